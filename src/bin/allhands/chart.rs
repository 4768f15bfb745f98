//! The chart of a sweep: bus bandwidth and latency over size, out of place, both axes logarithmic, a line for each
//! number of ranks.
use crate::row::{Results, Row};
use std::fmt::Write;

const WIDTH: f64 = 1120.0;
const HEIGHT: f64 = 488.0;
const TOP: f64 = 122.0;
const BOTTOM: f64 = 52.0;
/// Left edges of the two panels, and their width.
const PANELS: [f64; 2] = [70.0, 636.0];
const PANEL: f64 = 454.0;
/// Distinguishable with the common kinds of colour blindness (Okabe and Ito's set without its yellow).
const COLOURS: [&str; 7] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333"];

/// A line of the chart.
struct Series<'a> {
    name: String,
    colour: &'static str,
    rows: Vec<&'a Row>,
}

/// An SVG document. `devices` are those that ranks went round.
pub fn draw(results: &Results, devices: &str) -> String {
    let (series, what) = series(results);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"12\" fill=\"#3d434b\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n"
    );
    let left = PANELS[0] - 44.0;
    text(
        &mut out,
        left,
        32.0,
        "font-size=\"19\" font-weight=\"600\" fill=\"#1c2126\"",
        &format!("{}{what}", results.collective),
    );
    text(&mut out, left, 54.0, "fill=\"#6b727b\"", &subtitle(&series, devices));
    let mut x = left;
    for s in &series {
        push(
            &mut out,
            format_args!(
                "<line x1=\"{x:.1}\" y1=\"72\" x2=\"{:.1}\" y2=\"72\" stroke=\"{}\" stroke-width=\"2.5\"/>\
             <circle cx=\"{:.1}\" cy=\"72\" r=\"3.5\" fill=\"{1}\"/>",
                x + 24.0,
                s.colour,
                x + 12.0
            ),
        );
        text(&mut out, x + 30.0, 76.0, "", &s.name);
        x += 56.0 + 7.0 * s.name.len() as f64;
    }
    let bandwidth = |r: &Row| r.out_of_place.bus_bw;
    panel(&mut out, PANELS[0], "bus bandwidth, GB/s", &series, bandwidth);
    panel(&mut out, PANELS[1], "latency (median), us", &series, |r| r.latency_us.p50);
    out.push_str("</svg>\n");
    out
}

/// The lines, and what all of them have in common beyond the collective.
fn series(results: &Results) -> (Vec<Series<'_>>, String) {
    let kind = |r: &Row| match r.redop {
        "none" => r.dtype.to_string(),
        op => format!("{op} of {}", r.dtype),
    };
    let mut kinds: Vec<String> = Vec::new();
    let mut lines: Vec<(String, u32, Vec<&Row>)> = Vec::new();
    for row in &results.rows {
        let kind = kind(row);
        if !kinds.contains(&kind) {
            kinds.push(kind.clone());
        }
        match lines.iter_mut().find(|l| l.0 == kind && l.1 == row.ranks) {
            Some(line) => line.2.push(row),
            None => lines.push((kind, row.ranks, vec![row])),
        }
    }
    // Lines of many kinds would hide each other: the first kind stands for all.
    let shown = kinds.first().cloned().unwrap_or_default();
    let series = lines.into_iter().filter(|l| l.0 == shown).zip(COLOURS.iter().cycle());
    let series = series.map(|((_, ranks, rows), colour)| Series {
        name: if ranks == 1 { "1 rank".into() } else { format!("{ranks} ranks") },
        colour,
        rows,
    });
    (series.collect(), if shown.is_empty() { shown } else { format!(", {shown}") })
}

fn subtitle(series: &[Series<'_>], devices: &str) -> String {
    let rows = || series.iter().flat_map(|s| &s.rows);
    let distinct = |of: fn(&Row) -> &str| {
        let mut all: Vec<&str> = Vec::new();
        rows().map(|r| of(r)).filter(|s| *s != "none").for_each(|s| {
            if !all.contains(&s) {
                all.push(s)
            }
        });
        all.join(", ")
    };
    let parts = [devices.to_string(), distinct(|r| &r.algorithm), distinct(|r| &r.path), distinct(|r| &r.sync)];
    parts.into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join("  \u{b7}  ")
}

fn panel(out: &mut String, left: f64, title: &str, series: &[Series<'_>], y: impl Fn(&Row) -> f64) {
    let bottom = HEIGHT - BOTTOM;
    text(out, left - 44.0, TOP - 14.0, "font-weight=\"600\"", title);
    let points =
        || series.iter().flat_map(|s| &s.rows).map(|r| (r.size as f64, y(r))).filter(|p| p.0 > 0.0 && p.1 > 0.0);
    if points().next().is_none() {
        let style = "text-anchor=\"middle\" fill=\"#8a9199\"";
        text(out, left + PANEL / 2.0, (TOP + bottom) / 2.0, style, "nothing crosses");
        return;
    }
    let range = |of: fn((f64, f64)) -> f64| {
        points().map(of).fold((f64::MAX, 0.0f64), |(low, high), v| (low.min(v), high.max(v)))
    };
    let (x_low, x_high) = range(|p| p.0);
    let (x_low, x_high) = if x_low == x_high { (x_low / 2.0, x_high * 2.0) } else { (x_low, x_high) };
    let (y_low, y_high) = range(|p| p.1);
    let (y_low, y_high) = (floor_125(y_low), ceil_125(y_high * 1.02));
    let at_x = |v: f64| left + PANEL * (v / x_low).ln() / (x_high / x_low).ln();
    let at_y = |v: f64| bottom - (bottom - TOP) * (v / y_low).ln() / (y_high / y_low).ln();

    let ticks = ticks_125(y_low, y_high);
    for &tick in &ticks {
        let (y, right) = (at_y(tick), left + PANEL);
        push(
            out,
            format_args!("<line x1=\"{left:.1}\" y1=\"{y:.1}\" x2=\"{right:.1}\" y2=\"{y:.1}\" stroke=\"#e6e8eb\"/>"),
        );
        text(out, left - 8.0, y + 4.0, "text-anchor=\"end\"", &number(tick));
    }
    // Powers of two, few enough for their names to fit.
    let powers: Vec<i32> = (x_low.log2().ceil() as i32..=x_high.log2().floor() as i32).collect();
    let step = powers.len().div_ceil(8).max(1);
    for &power in powers.iter().step_by(step) {
        let x = at_x(2f64.powi(power));
        push(out, format_args!("<line x1=\"{x:.1}\" y1=\"{TOP}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#f1f2f4\"/>"));
        text(out, x, bottom + 18.0, "text-anchor=\"middle\"", &bytes(power));
    }
    push(
        out,
        format_args!(
            "<line x1=\"{left:.1}\" y1=\"{bottom}\" x2=\"{:.1}\" y2=\"{bottom}\" stroke=\"#9aa1a9\"/>",
            left + PANEL
        ),
    );
    text(out, left + PANEL / 2.0, bottom + 40.0, "text-anchor=\"middle\" fill=\"#6b727b\"", "size");

    for s in series {
        let shown = || s.rows.iter().filter(|r| r.size > 0 && y(r) > 0.0);
        let line: Vec<String> = shown().map(|r| format!("{:.1},{:.1}", at_x(r.size as f64), at_y(y(r)))).collect();
        push(
            out,
            format_args!(
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"2\" stroke-linejoin=\"round\"/>",
                line.join(" "),
                s.colour
            ),
        );
        for r in shown() {
            push(
                out,
                format_args!(
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.2\" fill=\"{}\" stroke=\"#fff\"><title>{}, {} bytes, {}: {} GB/s, {} us</title></circle>",
                    at_x(r.size as f64),
                    at_y(y(r)),
                    s.colour,
                    s.name,
                    r.size,
                    r.algorithm,
                    number(r.out_of_place.bus_bw),
                    number(r.latency_us.p50)
                ),
            );
        }
    }
}

fn push(out: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{what}");
}

fn text(out: &mut String, x: f64, y: f64, style: &str, what: &str) {
    let what = what.replace('&', "&amp;").replace('<', "&lt;");
    push(out, format_args!("<text x=\"{x:.1}\" y=\"{y:.1}\" {style}>{what}</text>"));
}

/// The steps 1, 2, 5 of every decade within a range; whole decades only where that would be too many.
fn ticks_125(low: f64, high: f64) -> Vec<f64> {
    let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
    let steps: &[f64] = if high / low > 1e3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
    let all = decades.flat_map(|d| steps.iter().map(move |s| s * 10f64.powi(d)));
    all.filter(|t| (low * 0.999..=high * 1.001).contains(t)).collect()
}

fn floor_125(v: f64) -> f64 {
    let decade = 10f64.powf(v.log10().floor());
    [5.0, 2.0].into_iter().map(|s| s * decade).find(|t| *t <= v * 1.0001).unwrap_or(decade)
}

fn ceil_125(v: f64) -> f64 {
    let decade = 10f64.powf(v.log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|s| s * decade).find(|t| *t >= v * 0.9999).unwrap_or(10.0 * decade)
}

/// About three digits.
fn number(v: f64) -> String {
    let digits = (2 - v.abs().max(1e-9).log10().floor() as i32).clamp(0, 9) as usize;
    let full = format!("{v:.digits$}");
    if full.contains('.') { full.trim_end_matches('0').trim_end_matches('.').into() } else { full }
}

/// Two to the power of so many, in bytes.
fn bytes(power: i32) -> String {
    let (unit, name) = match power {
        ..10 => (0, "B"),
        10..20 => (10, "KiB"),
        20..30 => (20, "MiB"),
        _ => (30, "GiB"),
    };
    format!("{} {name}", 2f64.powi(power - unit))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::tests::row;

    #[test]
    fn a_line_for_each_number_of_ranks() {
        let rows =
            (10..23).flat_map(|p| [2, 3, 4].map(|n| row(1 << p, n, f64::from(n) * 20.0 + (1 << p) as f64 / 4e3)));
        let results = Results { collective: "all_reduce", rows: rows.collect(), wrong: 0 };
        let svg = draw(&results, "proxy-vulkan:0, cpu");
        assert_eq!(svg.matches("<polyline").count(), 6);
        for word in ["all_reduce, sum of f32", "4 ranks", "1 KiB", "4 MiB", "one-shot", "proxy-vulkan:0"] {
            assert!(svg.contains(word), "{word}");
        }
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn what_has_no_logarithm_is_left_out() {
        let mut alone = row(0, 1, 3.0);
        alone.out_of_place.bus_bw = 0.0;
        let svg = draw(&Results { collective: "barrier", rows: vec![alone], wrong: 0 }, "cpu");
        assert_eq!(svg.matches("<polyline").count(), 0);
        let svg = draw(&Results { collective: "all_reduce", rows: vec![row(4096, 2, 3.0)], wrong: 0 }, "cpu");
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn numbers_and_ticks_are_round() {
        assert_eq!(ticks_125(floor_125(0.13), ceil_125(4.2)), [0.1, 0.2, 0.5, 1.0, 2.0, 5.0]);
        assert_eq!([number(0.05), number(1234.5), number(20.0), number(1.5)], ["0.05", "1234", "20", "1.5"]);
        assert_eq!([bytes(2), bytes(10), bytes(25)], ["4 B", "1 KiB", "32 MiB"]);
    }
}

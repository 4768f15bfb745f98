//! A chart of times over sizes, both axes logarithmic, as SVG.

use super::size;
use std::fmt::Write;

/// One diagram.
pub struct Panel {
    pub title: String,
    /// Name; size and time of each point.
    pub lines: Vec<(String, Vec<(u64, f64)>)>,
}

impl Panel {
    /// Of points: the line each is on, its size and its time.
    pub fn new<'a>(title: &str, points: impl Iterator<Item = (&'a str, u64, f64)>) -> Self {
        let mut lines: Vec<(String, Vec<(u64, f64)>)> = Vec::new();
        for (name, size, time) in points {
            match lines.iter_mut().find(|line| line.0 == name) {
                Some((_, points)) => points.push((size, time)),
                None => lines.push((name.into(), vec![(size, time)])),
            }
        }
        Panel { title: title.into(), lines }
    }
}

const WIDTH: f64 = 460.0;
const HEIGHT: f64 = 300.0;
const TOP: f64 = 90.0;
const LEFT: f64 = 70.0;
/// From the left edge of a panel to that of the next.
const STEP: f64 = WIDTH + 100.0;
/// Distinguishable with the common kinds of colour blindness.
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333", "#8a9199"];

/// A document with the panels side by side.
pub fn draw(title: &str, subtitle: &str, panels: &[Panel]) -> String {
    let lines = panels.iter().map(|p| p.lines.len()).max().unwrap_or(0) as f64;
    let (width, height) = (STEP * panels.len() as f64 + 20.0, TOP + HEIGHT + 50.0 + 18.0 * lines);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" width=\"{width}\" height=\"{height}\" \
         font-family=\"system-ui, 'DejaVu Sans', sans-serif\" font-size=\"12\" fill=\"#3d434b\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n"
    );
    text(&mut out, 26.0, 30.0, "font-size=\"18\" font-weight=\"600\"", title);
    text(&mut out, 26.0, 50.0, "fill=\"#6b727b\"", subtitle);
    for (number, panel) in panels.iter().enumerate() {
        draw_panel(&mut out, LEFT + STEP * number as f64, panel);
    }
    out.push_str("</svg>\n");
    out
}

fn draw_panel(out: &mut String, left: f64, panel: &Panel) {
    let bottom = TOP + HEIGHT;
    text(out, left, TOP - 12.0, "font-weight=\"600\"", &panel.title);
    // What is not above nothing has no logarithm.
    let points = || panel.lines.iter().flat_map(|(_, points)| points).filter(|p| p.1 > 0.0);
    let range = |of: fn(&(u64, f64)) -> f64| {
        points().map(of).fold((f64::MAX, f64::MIN_POSITIVE), |(low, high), v| (low.min(v), high.max(v)))
    };
    let (x_low, x_high) = range(|p| p.0 as f64);
    let (y_low, y_high) = range(|p| p.1);
    if x_low > x_high {
        return;
    }
    let (x_high, decades) = (x_high.max(x_low * 2.0), y_low.log10().floor() as i32..=y_high.log10().ceil() as i32);
    let (y_low, y_high) = (10f64.powi(*decades.start()), 10f64.powi((*decades.end()).max(decades.start() + 1)));
    let at_x = |v: f64| left + WIDTH * (v / x_low).ln() / (x_high / x_low).ln();
    let at_y = |v: f64| bottom - HEIGHT * (v / y_low).ln() / (y_high / y_low).ln();
    for decade in decades {
        let (y, right) = (at_y(10f64.powi(decade)), left + WIDTH);
        push(out, format_args!("<path d=\"M{left:.1} {y:.1}H{right:.1}\" stroke=\"#e6e8eb\"/>"));
        text(out, left - 6.0, y + 4.0, "text-anchor=\"end\"", &10f64.powi(decade).to_string());
    }
    let mut sizes: Vec<u64> = points().map(|p| p.0).collect();
    sizes.sort();
    sizes.dedup();
    for bytes in sizes {
        text(out, at_x(bytes as f64), bottom + 18.0, "text-anchor=\"middle\"", &size(bytes));
    }
    for (number, ((name, points), colour)) in panel.lines.iter().zip(COLOURS.iter().cycle()).enumerate() {
        let shown: Vec<_> = points.iter().filter(|p| p.1 > 0.0).map(|p| (at_x(p.0 as f64), at_y(p.1))).collect();
        let path: Vec<_> = shown.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let style = format!("fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"");
        push(out, format_args!("<polyline points=\"{}\" {style}/>", path.join(" ")));
        for (x, y) in shown {
            push(out, format_args!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>"));
        }
        let y = bottom + 42.0 + 18.0 * number as f64;
        push(out, format_args!("<path d=\"M{left:.1} {y:.1}h24\" stroke=\"{colour}\" stroke-width=\"2.5\"/>"));
        text(out, left + 30.0, y + 4.0, "", name);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_is_drawn_and_nothing_is_infinite() {
        let line =
            |name: &str, times: &[f64]| (name.to_string(), (12..).map(|p| 1 << p).zip(times.iter().copied()).collect());
        let panels = [
            Panel { title: "2 ranks".into(), lines: vec![line("a", &[3.0, 0.0, 5e4]), line("b & c", &[-1.0])] },
            Panel { title: "one".into(), lines: vec![line("a", &[1.0])] },
            Panel { title: "none".into(), lines: Vec::new() },
        ];
        let svg = draw("title", "below", &panels);
        assert_eq!((svg.matches("<polyline").count(), svg.matches("<circle").count()), (3, 3));
        assert!(svg.contains("b &amp; c") && svg.contains("16 KiB"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}

//! A row of results: as a line of nccl-tests' table and more, and as JSON.
use crate::{kind::Job, measure::Sample};
use allhands::DataType;
use serde::Serialize;
use std::{fmt, time::Duration};

/// Everything that was measured, as the JSON file has it.
#[derive(Serialize)]
pub struct Results {
    pub collective: &'static str,
    pub rows: Vec<Row>,
    /// Wrong elements and guard bytes, over all rows and repetitions.
    pub wrong: u64,
}

/// One size, type and reduction over so many ranks.
#[derive(Clone, Serialize)]
pub struct Row {
    /// Bytes of the larger buffer.
    pub size: u64,
    /// Elements, as the call takes them.
    pub count: u64,
    #[serde(rename = "type")]
    pub dtype: &'static str,
    pub redop: &'static str,
    /// -1 where there is none.
    pub root: i64,
    pub ranks: u32,
    pub algorithm: String,
    pub path: String,
    pub sync: String,
    pub reduced_on: String,
    pub out_of_place: Side,
    /// `null` where the collective has no in-place form.
    pub in_place: Option<Side>,
    /// Of the calls out of place.
    pub latency_us: Latency,
    pub submits_per_op: u32,
    /// See [`crate::bound`].
    pub bound_us: f64,
}

/// What one placement gave.
#[derive(Clone, Copy, Serialize)]
pub struct Side {
    pub time_us: f64,
    /// GB/s, as all bandwidths.
    pub alg_bw: f64,
    pub bus_bw: f64,
    /// `null` where nothing was checked.
    pub nwrong: Option<u64>,
}

/// Of single calls.
#[derive(Clone, Copy, Serialize)]
pub struct Latency {
    pub p50: f64,
    pub p99: f64,
}

impl Row {
    pub fn new(
        job: &Job,
        dtype: DataType,
        redop: &'static str,
        out_of_place: &Sample,
        in_place: Option<&Sample>,
        bound: Duration,
    ) -> Row {
        let size = job.elements() * dtype.size();
        let report = &out_of_place.report;
        let at = |share| percentile(&out_of_place.latencies, share);
        Row {
            size,
            count: job.count,
            dtype: dtype.name(),
            redop,
            root: if job.kind.rooted() { job.root.into() } else { -1 },
            ranks: job.ranks,
            algorithm: report.algorithm.map_or("none".into(), |a| a.to_string()),
            path: report.path.clone(),
            sync: report.sync.clone(),
            reduced_on: report.reduced_on.to_string(),
            out_of_place: Side::new(size, job, out_of_place),
            in_place: in_place.map(|sample| Side::new(size, job, sample)),
            latency_us: Latency { p50: micros(at(0.5)), p99: micros(at(0.99)) },
            submits_per_op: report.submits,
            bound_us: micros(bound),
        }
    }
    pub fn wrong(&self) -> u64 {
        [Some(self.out_of_place), self.in_place].into_iter().flatten().filter_map(|s| s.nwrong).sum()
    }
}

impl Side {
    fn new(size: u64, job: &Job, sample: &Sample) -> Side {
        let time_us = micros(sample.time);
        let alg_bw = size as f64 / time_us.max(1e-3) / 1e3;
        Side {
            time_us,
            alg_bw,
            bus_bw: alg_bw * job.bus_factor(),
            nwrong: sample.wrong.as_ref().map(|wrong| wrong.count),
        }
    }
}

/// The table's head.
pub const HEAD: &str = "\
#                                                           out-of-place                         in-place
#       size        count   type   redop  root      time   algbw   busbw  #wrong      time   algbw   busbw  #wrong       p50       p99  ranks  algorithm        path   sync  reduced  submits  bound
#        (B)   (elements)                           (us)  (GB/s)  (GB/s)              (us)  (GB/s)  (GB/s)              (us)      (us)                                        on          (of time)";

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { size, count, dtype, redop, root, ranks, algorithm, path, sync, reduced_on, .. } = self;
        write!(f, "{size:>12} {count:>12} {dtype:>6} {redop:>7} {root:>5}  ")?;
        for side in [Some(&self.out_of_place), self.in_place.as_ref()] {
            match side {
                Some(s) => {
                    let wrong = s.nwrong.map_or("N/A".into(), |n| n.to_string());
                    let (alg, bus) = (short(s.alg_bw), short(s.bus_bw));
                    write!(f, "{:>8} {alg:>7} {bus:>7} {wrong:>7}  ", short(s.time_us))?;
                }
                None => write!(f, "{0:>8} {0:>7} {0:>7} {0:>7}  ", "N/A")?,
            }
        }
        let (p50, p99) = (short(self.latency_us.p50), short(self.latency_us.p99));
        write!(f, "{p50:>8}  {p99:>8}  {ranks:>5}  {algorithm:>9} {path:>11} {sync:>6}  {reduced_on:>7}  ")?;
        let share = 100.0 * self.bound_us / self.out_of_place.time_us.max(1e-3);
        write!(f, "{:>7}  {share:>4.0}%", self.submits_per_op)
    }
}

/// Of ascending times, the one that `share` of them do not exceed (nearest rank).
pub fn percentile(ascending: &[Duration], share: f64) -> Duration {
    let rank = (share * ascending.len() as f64).ceil().max(1.0) as usize;
    ascending.get(rank - 1).copied().unwrap_or_default()
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

/// About four digits.
fn short(x: f64) -> String {
    match x {
        x if x < 0.9995 => format!("{x:.3}"),
        x if x >= 999.95 => format!("{x:.0}"),
        x if x >= 99.995 => format!("{x:.1}"),
        x => format!("{x:.2}"),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;

    pub fn row(size: u64, ranks: u32, time_us: f64) -> Row {
        let alg_bw = size as f64 / time_us / 1e3;
        let side = Side { time_us, alg_bw, bus_bw: 1.5 * alg_bw, nwrong: Some(1) };
        Row {
            size,
            count: size / 4,
            dtype: "f32",
            redop: "sum",
            root: -1,
            ranks,
            algorithm: "one-shot".into(),
            path: "copied".into(),
            sync: "relay".into(),
            reduced_on: "device".into(),
            out_of_place: side,
            in_place: None,
            latency_us: Latency { p50: time_us, p99: 1.5 * time_us },
            submits_per_op: 2,
            bound_us: time_us / 4.0,
        }
    }

    #[test]
    fn json_has_the_documented_names() {
        let mut results = Results { collective: "all_reduce", rows: vec![row(1 << 20, 4, 100.0)], wrong: 1 };
        results.rows[0].in_place = Some(Side { nwrong: None, ..results.rows[0].out_of_place });
        let json = serde_json::to_value(&results).unwrap();
        let names = |v: &serde_json::Value| -> Vec<String> { v.as_object().unwrap().keys().cloned().collect() };
        let sorted = |mut v: Vec<&'static str>| {
            v.sort();
            v
        };
        assert_eq!(names(&json), sorted(vec!["collective", "rows", "wrong"]));
        let row = &json["rows"][0];
        let expected = "size count type redop root ranks algorithm path sync reduced_on out_of_place in_place \
                        latency_us submits_per_op bound_us";
        assert_eq!(names(row), sorted(expected.split_whitespace().collect()));
        for side in ["out_of_place", "in_place"] {
            assert_eq!(names(&row[side]), sorted(vec!["time_us", "alg_bw", "bus_bw", "nwrong"]));
        }
        assert_eq!(names(&row["latency_us"]), ["p50", "p99"]);
        assert_eq!(row["out_of_place"]["time_us"], 100.0);
        assert!(row["in_place"]["nwrong"].is_null());
    }

    #[test]
    fn columns_stand_under_their_heads() {
        let ends = |line: &str| -> Vec<usize> {
            let starts = line.char_indices().filter(|(i, c)| *c == ' ' && !line[..*i].ends_with(' '));
            starts
                .map(|(i, _)| i)
                .chain([line.len()])
                .filter(|end| line[..*end].ends_with(|c| !" #".contains(c)))
                .collect()
        };
        let (head, row) = (HEAD.lines().nth(1).unwrap(), row(1 << 20, 4, 100.0).to_string());
        assert_eq!(ends(head), ends(&row), "\n{head}\n{row}");
        assert_eq!(ends(head).len(), 22);
    }

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let times: Vec<Duration> = (1..=20).map(Duration::from_micros).collect();
        assert_eq!(percentile(&times, 0.5), Duration::from_micros(10));
        assert_eq!(percentile(&times, 0.99), Duration::from_micros(20));
        assert_eq!(percentile(&times[..1], 0.5), Duration::from_micros(1));
        assert_eq!(percentile(&[], 0.5), Duration::ZERO);
    }
}

//! Measurements kept on disk, so that the next process need not make them again: speeds of devices, and how long the
//! proven paths between two of them take. Proofs are not kept.
//!
//! The file is `measured` in `$ALLHANDS_CACHE`, or else in `allhands` under `$XDG_CACHE_HOME` or `~/.cache`; an empty
//! `ALLHANDS_CACHE` turns it off. A line is an entry, its fields separated by tabs; devices are told by backend, name
//! and driver. The first line names the format and the version of the crate: a file that says otherwise is not read.
//! Nothing here is an error: what cannot be read is measured, and what cannot be written is measured again.
use crate::{
    contract::Device,
    link::Sync,
    schedule::{Path, cost::Speed},
};
use std::{collections::BTreeMap, env, fmt::Write, fs, path::PathBuf, process, time::Duration};

const HEADER: &str = concat!("allhands measurements 1, version ", env!("CARGO_PKG_VERSION"));
/// More has no use, and a file without bounds would be read at every start.
const MOST: usize = 10_000;

/// What is taken to be as fast: the same backend, device and driver.
pub(crate) fn kind(device: &dyn Device) -> String {
    let info = device.info();
    format!("{} / {} / {}", info.backend, info.name, info.driver).replace(char::is_control, " ")
}

/// How long an exchange between two devices takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Measured {
    /// The median of a few small exchanges, the best of a few of 1 MiB each way.
    pub small: Duration,
    pub bulk: Duration,
}

/// The devices of a pair, in the order of their ranks, and the way between them.
pub(crate) type Way = (String, String, Path, Sync);

/// The file's content.
#[derive(Default)]
pub(crate) struct Cache {
    file: Option<PathBuf>,
    changed: bool,
    entries: Entries,
}

#[derive(Clone, PartialEq, Debug, Default)]
struct Entries {
    /// Of a kind of device, while the devices of a set work too.
    speeds: BTreeMap<(String, String), Speed>,
    ways: BTreeMap<Way, Measured>,
}

impl Cache {
    /// What earlier processes left.
    pub fn load() -> Self {
        let file = file("measured");
        let text = file.as_ref().and_then(|f| fs::read_to_string(f).ok()).unwrap_or_default();
        Cache { file, changed: false, entries: Entries::parse(&text).unwrap_or_default() }
    }
    pub fn speed(&self, kind: &str, set: &str) -> Option<Speed> {
        self.entries.speeds.get(&(kind.into(), set.into())).copied()
    }
    pub fn keep_speed(&mut self, kind: &str, set: &str, speed: Speed) {
        self.changed = true;
        self.entries.speeds.insert((kind.into(), set.into()), speed);
    }
    pub fn way(&self, way: &Way) -> Option<Measured> {
        self.entries.ways.get(way).copied()
    }
    pub fn keep_way(&mut self, way: Way, measured: Measured) {
        self.changed = true;
        self.entries.ways.insert(way, measured);
    }
    /// Writes what is new, in one stroke: another process reads the old file or the new one.
    pub fn save(&self) {
        let Some(file) = self.file.as_ref().filter(|_| self.changed) else { return };
        let write = || {
            fs::create_dir_all(file.parent()?).ok()?;
            let beside = file.with_extension(format!("{}.new", process::id()));
            fs::write(&beside, self.entries.text()).ok()?;
            fs::rename(&beside, file).ok()
        };
        if write().is_none() {
            log::debug!("measurements cannot be kept in {}", file.display());
        }
    }
}

/// A file of the cache.
pub(crate) fn file(name: &str) -> Option<PathBuf> {
    let from = |name| env::var_os(name).map(PathBuf::from);
    let directory = match from("ALLHANDS_CACHE") {
        Some(own) => own,
        None => from("XDG_CACHE_HOME")
            .filter(|d| d.is_absolute())
            .or_else(|| from("HOME").map(|home| home.join(".cache")))?
            .join("allhands"),
    };
    (!directory.as_os_str().is_empty()).then(|| directory.join(name))
}

impl Entries {
    fn text(&self) -> String {
        let mut out = format!("{HEADER}\n");
        for ((kind, set), s) in &self.speeds {
            let overlap = if s.overlap { "overlap" } else { "apart" };
            let numbers = [s.submit, s.launch, s.copy, s.reduce].map(|x| format!("{x:e}")).join("\t");
            let _ = writeln!(out, "speed\t{kind}\t{set}\t{numbers}\t{overlap}");
        }
        for ((from, to, path, sync), m) in &self.ways {
            let (small, bulk) = (m.small.as_nanos(), m.bulk.as_nanos());
            let _ = writeln!(out, "way\t{from}\t{to}\t{path}\t{sync}\t{small}\t{bulk}");
        }
        out
    }
    /// `None` if anything is not as it would have been written: then nothing in it can be relied on.
    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        if lines.next()? != HEADER || !text.ends_with('\n') {
            return None;
        }
        let mut entries = Entries::default();
        for line in lines.take(MOST) {
            let fields: Vec<&str> = line.split('\t').collect();
            match fields[..] {
                ["speed", kind, set, submit, launch, copy, reduce, overlap] => {
                    let number = |text: &str| text.parse::<f64>().ok().filter(|x| x.is_finite() && *x >= 0.0);
                    let [submit, launch] = [number(submit)?, number(launch)?];
                    let [copy, reduce] = [number(copy)?, number(reduce)?];
                    let overlap = match overlap {
                        "overlap" => true,
                        "apart" => false,
                        _ => return None,
                    };
                    let speed = Speed { submit, launch, copy, reduce, overlap };
                    entries.speeds.insert((kind.into(), set.into()), speed);
                }
                ["way", from, to, path, sync, small, bulk] => {
                    let time = |text: &str| text.parse().ok().map(Duration::from_nanos);
                    let way = (from.into(), to.into(), path.parse().ok()?, sync.parse().ok()?);
                    entries.ways.insert(way, Measured { small: time(small)?, bulk: time(bulk)? });
                }
                _ => return None,
            }
        }
        Some(entries)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Entries {
        let way = |path, sync| ("a / b 1.0 / c".to_string(), "d".to_string(), path, sync);
        let speed = Speed { submit: 1.25e-5, launch: 2e-6, copy: 1e9, reduce: f64::MIN_POSITIVE, overlap: false };
        let measured = |small, bulk| Measured { small: Duration::from_nanos(small), bulk: Duration::from_millis(bulk) };
        Entries {
            speeds: [(("a".into(), "2 a".into()), speed), (("b".into(), "".into()), Speed { overlap: true, ..speed })]
                .into(),
            ways: [
                (way(Path::Copied, Sync::Relay), measured(7, 9)),
                (way(Path::SharedHost, Sync::Native), measured(0, 1_000_000)),
            ]
            .into(),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(Entries::parse(&entries().text()), Some(entries()));
    }

    /// Whatever byte is changed or cut off, the file is ignored or holds entries of the right form.
    #[test]
    fn a_damaged_file_is_ignored() {
        let text = entries().text();
        for cut in 0..text.len() {
            if !text[..cut].ends_with('\n') {
                assert_eq!(Entries::parse(&text[..cut]), None, "cut at {cut}");
            }
        }
        for (from, to) in [
            ("measurements 1", "measurements 2"),
            (env!("CARGO_PKG_VERSION"), "0.0.0"),
            ("1e9", "inf"),
            ("1e9", "-1e9"),
            ("1e9", "NaN"),
            ("apart", "together"),
            ("copied", "teleported"),
            ("relay", "magic"),
            ("speed", "sped"),
            ("\t7\t", "\t-7\t"),
            ("\t7\t", "\t7\t7\t"),
        ] {
            assert!(text.contains(from));
            assert_eq!(Entries::parse(&text.replacen(from, to, 1)), None, "{from} to {to}");
        }
    }
}

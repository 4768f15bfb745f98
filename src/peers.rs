//! Proofs of peer access that are kept.
//!
//! A card that writes into another's memory can hang the host, which no deadline catches. So peer access is proven in
//! a child process, by `allhands prove`, and is off until then. The proof is kept on disk and holds for these two
//! devices at these addresses, with this driver and this kernel; a library call never makes one by itself.
use crate::{cache, contract::Device};
use std::{fs, io};

/// What was found out about a pair of devices, in either order. Without a newline.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// What one wrote, the other read, both ways.
    Proven,
    /// It was not so, or the child did not come back.
    Failed(String),
}

/// What is kept of a pair, for the kernel that runs now.
pub fn kept(a: &dyn Device, b: &dyn Device) -> Option<Verdict> {
    let text = fs::read_to_string(cache::file("peers")?).ok()?;
    let (key, mut found) = (key(a, b), None);
    for line in text.lines() {
        if let Some((verdict, _)) = line.split_once('\t').filter(|(_, rest)| *rest == key) {
            found = Some(match verdict {
                "proven" => Verdict::Proven,
                why => Verdict::Failed(why.into()),
            });
        }
    }
    found
}

/// Keeps what was found out, in place of what was kept before.
///
/// # Errors
/// Where there is no directory to keep it in, or it cannot be written.
pub fn keep(a: &dyn Device, b: &dyn Device, verdict: &Verdict) -> io::Result<()> {
    let none = || io::Error::new(io::ErrorKind::NotFound, "no directory for the cache; set ALLHANDS_CACHE");
    let (file, key) = (cache::file("peers").ok_or_else(none)?, key(a, b));
    let old = fs::read_to_string(&file).unwrap_or_default();
    let others = old.lines().filter(|line| line.split_once('\t').is_some_and(|(_, rest)| rest != key));
    let word = match verdict {
        Verdict::Proven => "proven".to_string(),
        Verdict::Failed(why) => why.replace(char::is_control, " "),
    };
    let mut text: String = others.map(|line| format!("{line}\n")).collect();
    text.push_str(&format!("{word}\t{key}\n"));
    if let Some(directory) = file.parent() {
        fs::create_dir_all(directory)?;
    }
    // Whoever reads it meanwhile sees the old or the new, never half.
    let new = file.with_extension(std::process::id().to_string());
    fs::write(&new, text)?;
    fs::rename(new, file)
}

fn key(a: &dyn Device, b: &dyn Device) -> String {
    let one = |device: &dyn Device| {
        let info = device.info();
        let address = info.address.as_deref().unwrap_or("no address");
        format!("{} at {address}", cache::kind(device))
    };
    let mut pair = [one(a), one(b)];
    pair.sort();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    format!("{}\t{}\tkernel {}", pair[0], pair[1], kernel.trim())
}

//! Archives in the form that Linux unpacks at boot: `newc`, Documentation/driver-api/early-userspace/buffer-format.rst
//! in the kernel's sources.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

const DIRECTORY: u32 = 0o040755;
const PROGRAM: u32 = 0o100755;
const LINK: u32 = 0o120777;

/// An archive being written. Every path in it is absolute in the guest, and given without the leading slash.
pub struct Archive {
    out: BufWriter<File>,
    entries: BTreeSet<String>,
}

impl Archive {
    /// An empty one.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { out: BufWriter::with_capacity(1 << 20, File::create(path)?), entries: BTreeSet::new() })
    }

    /// An empty directory, and those above it.
    pub fn directory(&mut self, path: &str) -> io::Result<()> {
        if let Some((above, _)) = path.rsplit_once('/') {
            self.directory(above)?;
        }
        self.entry(path, DIRECTORY, b"")
    }

    /// An executable file; a second one of the same path is left out.
    pub fn file(&mut self, path: &str, contents: &[u8]) -> io::Result<()> {
        self.above(path)?;
        self.entry(path, PROGRAM, contents)
    }

    /// The file `from` of the host, links followed.
    pub fn copy(&mut self, path: &str, from: &Path) -> io::Result<()> {
        if self.entries.contains(path) {
            return Ok(());
        }
        let contents = std::fs::read(from).map_err(|e| io::Error::other(format!("{}: {e}", from.display())))?;
        self.file(path, &contents)
    }

    /// A symbolic link.
    pub fn link(&mut self, path: &str, to: &str) -> io::Result<()> {
        self.above(path)?;
        self.entry(path, LINK, to.as_bytes())
    }

    /// Ends the archive.
    pub fn finish(mut self) -> io::Result<()> {
        self.entry("TRAILER!!!", 0, b"")?;
        self.out.flush()
    }

    fn above(&mut self, path: &str) -> io::Result<()> {
        path.rsplit_once('/').map_or(Ok(()), |(above, _)| self.directory(above))
    }

    fn entry(&mut self, path: &str, mode: u32, contents: &[u8]) -> io::Result<()> {
        if !self.entries.insert(path.to_owned()) {
            return Ok(());
        }
        let too_large = |_| io::Error::other(format!("{path} is larger than the format can say"));
        let size = u32::try_from(contents.len()).map_err(too_large)?;
        let inode = self.entries.len() as u32;
        // inode, mode, user, group, links, time, size, four device numbers, length of the name, checksum.
        let fields = [inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, path.len() as u32 + 1, 0];
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08X}")?;
        }
        write!(self.out, "{path}\0")?;
        self.pad(110 + path.len() + 1)?;
        self.out.write_all(contents)?;
        self.pad(contents.len())
    }

    /// Names and contents begin at multiples of four.
    fn pad(&mut self, written: usize) -> io::Result<()> {
        self.out.write_all(&[0; 3][..written.wrapping_neg() % 4])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_aligned_and_never_doubled() {
        let path = std::env::temp_dir().join(format!("allhands-cpio-{}", std::process::id()));
        let mut archive = Archive::create(&path).unwrap();
        archive.file("a/bc", b"hello").unwrap();
        archive.file("a/bc", b"again").unwrap();
        archive.link("a/l", "bc").unwrap();
        archive.finish().unwrap();
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        let mut names = Vec::new();
        let mut at = 0;
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 6], b"070701", "an entry at {at}");
            let field = |i: usize| {
                let digits = std::str::from_utf8(&bytes[at + 6 + 8 * i..][..8]).unwrap();
                usize::from_str_radix(digits, 16).unwrap()
            };
            let (size, name) = (field(6), field(11));
            let start = (at + 110 + name).next_multiple_of(4);
            names.push(String::from_utf8(bytes[at + 110..at + 110 + name - 1].to_vec()).unwrap());
            if names.last().unwrap() == "a/bc" {
                assert_eq!(&bytes[start..start + size], b"hello");
            }
            at = (start + size).next_multiple_of(4);
        }
        assert_eq!(names, ["a", "a/bc", "a/l", "TRAILER!!!"]);
    }
}

//! What a buffer holds, guards and all: as it is written before a call, and as it must be after.
use crate::reference::Value;
use std::fmt;

/// Guard bytes on each side of a buffer's data.
pub const GUARD: usize = 256;

/// The bytes of a buffer: guard, data, guard. The second guard runs to the end, a multiple of 8 bytes.
#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
pub struct Image {
    words: Vec<u64>,
    data: usize,
}

impl Image {
    /// Makes it `elements` of `T` between guards. The data is left as it was.
    pub fn reset<T: Value>(&mut self, elements: u64) {
        self.data = elements as usize * size_of::<T>();
        self.words.resize(Image::size::<T>(elements) as usize / 8, 0);
        let end = GUARD + self.data;
        let bytes = self.bytes_mut();
        bytes[..GUARD].iter_mut().enumerate().for_each(|(i, b)| *b = guard(i));
        bytes[end..].iter_mut().enumerate().for_each(|(i, b)| *b = guard(end + i));
    }
    /// Makes it as long as `other`, whatever it then holds.
    pub fn resize_like(&mut self, other: &Image) {
        self.data = other.data;
        self.words.resize(other.words.len(), 0);
    }
    /// Makes it the same as `other`.
    pub fn copy(&mut self, other: &Image) {
        self.resize_like(other);
        self.words.copy_from_slice(&other.words);
    }
    /// Bytes of a buffer of `elements` of `T` between guards.
    pub fn size<T: Value>(elements: u64) -> u64 {
        (2 * GUARD as u64 + elements * size_of::<T>() as u64).next_multiple_of(8)
    }
    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }
    /// All of it.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        bytemuck::cast_slice_mut(&mut self.words)
    }
    /// What is between the guards.
    pub fn data<T: Value>(&self) -> &[T] {
        bytemuck::cast_slice(&self.bytes()[GUARD..][..self.data])
    }
    /// What is between the guards.
    pub fn data_mut<T: Value>(&mut self) -> &mut [T] {
        let len = self.data;
        bytemuck::cast_slice_mut(&mut self.bytes_mut()[GUARD..][..len])
    }
    /// Compares what was read back, `self`, with what must be there. `tolerance` gives the greatest distance at which
    /// an element still counts as right; without one every bit counts.
    pub fn compare<T: Value>(&self, want: &Image, tolerance: impl Fn(usize) -> Option<f64>) -> Wrong {
        let mut wrong = Wrong::default();
        if self.words == want.words {
            return wrong;
        }
        for (index, (got, want)) in self.data::<T>().iter().zip(want.data::<T>()).enumerate() {
            let same = bytemuck::bytes_of(got) == bytemuck::bytes_of(want);
            // A NaN is at no distance.
            let close = || tolerance(index).is_some_and(|t| (got.as_f64() - want.as_f64()).abs() <= t);
            if !same && !close() {
                wrong.note(|| format!("index {index}: got {}, want {}", Shown(got), Shown(want)));
            }
        }
        let guards = (0..GUARD).chain(GUARD + self.data..self.bytes().len());
        for at in guards.filter(|&at| self.bytes()[at] != want.bytes()[at]) {
            let (got, want) = (self.bytes()[at], want.bytes()[at]);
            let offset = at as i64 - GUARD as i64;
            wrong.note(|| format!("guard at byte {offset} of the data: got {got:#04x}, want {want:#04x}"));
        }
        wrong
    }
}

/// Elements and guard bytes that are not what they must be.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct Wrong {
    /// How many.
    pub count: u64,
    /// The first of them.
    pub first: Option<String>,
}

impl Wrong {
    /// Counts one more.
    pub fn note(&mut self, what: impl FnOnce() -> String) {
        self.count += 1;
        self.first.get_or_insert_with(what);
    }
    /// Adds those of one buffer, saying where it is.
    pub fn absorb(&mut self, of: Wrong, place: impl FnOnce() -> String) {
        self.count += of.count;
        if let (None, Some(first)) = (&self.first, of.first) {
            self.first = Some(format!("{}, {first}", place()));
        }
    }
}

struct Shown<'a, T>(&'a T);

impl<T: Value> fmt::Display for Shown<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (0x", self.0)?;
        bytemuck::bytes_of(self.0).iter().rev().try_for_each(|b| write!(f, "{b:02x}"))?;
        f.write_str(")")
    }
}

fn guard(at: usize) -> u8 {
    0xa5 ^ (at as u8).wrapping_mul(29)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_byte_is_seen_and_the_first_named() {
        let exact = |_| None;
        let mut want = Image::default();
        want.reset::<f32>(5);
        want.data_mut::<f32>().copy_from_slice(&[1.0, 2.0, 3.0, 4.0, 0.0]);
        assert_eq!(want.bytes().len() as u64, Image::size::<f32>(5));
        assert_eq!(want.clone().compare::<f32>(&want, exact), Wrong::default());

        let mut got = want.clone();
        got.data_mut::<f32>()[3] = f32::POISON;
        got.data_mut::<f32>()[4] = -0.0;
        let wrong = got.compare::<f32>(&want, exact);
        assert_eq!(wrong.count, 2);
        assert_eq!(wrong.first.unwrap(), "index 3: got NaN (0x7fc0dead), want 4 (0x40800000)");
        assert_eq!(got.compare::<f32>(&want, |_| Some(1e9)).count, 1, "a NaN is within no tolerance");

        for at in [0, GUARD - 1, GUARD + 20, want.bytes().len() - 1] {
            let mut got = want.clone();
            got.bytes_mut()[at] ^= 1;
            let wrong = got.compare::<f32>(&want, exact);
            assert_eq!(wrong.count, 1);
            assert!(wrong.first.unwrap().contains(&format!("byte {} of", at as i64 - 256)));
        }
    }

    #[test]
    fn a_shrunk_image_has_its_guard_behind_the_data() {
        let mut image = Image::default();
        image.reset::<u32>(100);
        image.data_mut::<u32>().fill(7);
        image.reset::<u32>(3);
        let mut fresh = Image::default();
        fresh.reset::<u32>(3);
        fresh.data_mut::<u32>().fill(7);
        assert_eq!(image.bytes(), fresh.bytes());
    }
}

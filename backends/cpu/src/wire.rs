//! How elements lie in memory and how they cross: as what they are, or f32 as a float of 16 bits; and the code of those.
//! Shared memory is only ever copied, never referred to.
use crate::{kernels::TILE, memory::Address, stream};
use bytemuck::Pod;
use half::{bf16, f16};
use std::marker::PhantomData;

/// Where a store or a source begins.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    pub start: Address,
    /// Whether it holds elements of the wire's type.
    pub narrow: bool,
    /// Whether what is written there goes past the caches.
    pub streams: bool,
}

impl Place {
    /// Where its element `index` is.
    #[inline(always)]
    fn at<T>(self, index: usize) -> *mut T {
        self.start.0.cast::<T>().wrapping_add(index)
    }
}

/// How elements lie in memory.
///
/// # Safety
/// Of what is loaded: it is mapped and nobody writes it. Of what is stored: it is mapped and writable, nobody else reads
/// or writes it, and [`stream::done`] follows before anybody does.
pub(crate) trait Wire<T: Pod> {
    /// `to[i] = f(to[i], element first + i)`.
    unsafe fn load<X: Copy>(place: Place, first: usize, to: &mut [X], f: impl Fn(X, T) -> X);
    /// What crosses of an element.
    fn round(item: T) -> T;
    /// Puts items that are as they cross where elements `first..` are.
    unsafe fn store(items: &[T], place: Place, first: usize);
}

/// # Safety
/// That of [`Wire`]. Any bytes are an element.
#[inline(always)]
unsafe fn load<T: Pod, X: Copy>(place: Place, first: usize, to: &mut [X], f: impl Fn(X, T) -> X) {
    let from = place.at::<T>(first);
    for (i, x) in to.iter_mut().enumerate() {
        // SAFETY: this function's contract.
        *x = f(*x, unsafe { from.wrapping_add(i).read_unaligned() });
    }
}

/// # Safety
/// That of [`Wire`].
unsafe fn store<T: Pod>(items: &[T], place: Place, first: usize) {
    let (from, to) = (items.as_ptr().cast(), place.at::<T>(first).cast::<u8>());
    // SAFETY: this function's contract; where a place streams, its start is aligned, and tiles are multiples of it.
    unsafe {
        match place.streams {
            true => stream::copy(from, to, size_of_val(items)),
            false => to.copy_from_nonoverlapping(from, size_of_val(items)),
        }
    }
}

/// As what they are.
pub(crate) struct Same;
impl<T: Pod> Wire<T> for Same {
    #[inline(always)]
    unsafe fn load<X: Copy>(place: Place, first: usize, to: &mut [X], f: impl Fn(X, T) -> X) {
        // SAFETY: the same contract.
        unsafe { load(place, first, to, f) }
    }
    #[inline(always)]
    fn round(item: T) -> T {
        item
    }
    unsafe fn store(items: &[T], place: Place, first: usize) {
        // SAFETY: the same contract.
        unsafe { store(items, place, first) }
    }
}

/// f32 that crosses as `H`: rounded wherever it comes from, narrow where the place says so.
pub(crate) struct As<H>(PhantomData<H>);
impl<H: Half> Wire<f32> for As<H> {
    #[inline(always)]
    unsafe fn load<X: Copy>(place: Place, first: usize, to: &mut [X], f: impl Fn(X, f32) -> X) {
        // SAFETY: the same contract.
        unsafe {
            match place.narrow {
                true => load(place, first, to, |x, h: H| f(x, h.decode())),
                false => load(place, first, to, |x, item| f(x, Self::round(item))),
            }
        }
    }
    #[inline(always)]
    fn round(item: f32) -> f32 {
        H::saturate(item).decode()
    }
    unsafe fn store(items: &[f32], place: Place, first: usize) {
        if !place.narrow {
            // SAFETY: the same contract.
            return unsafe { store(items, place, first) };
        }
        let mut narrow = [H::zeroed(); TILE];
        let narrow = &mut narrow[..items.len()];
        narrow.iter_mut().zip(items).for_each(|(h, x)| *h = H::saturate(*x));
        // SAFETY: the same contract.
        unsafe { store(narrow, place, first) }
    }
}

/// A float of 16 bits. (Without branches, so that it is vector code; the conversions of `half` ask the processor.)
pub(crate) trait Half: Pod {
    fn decode(self) -> f32;
    /// To nearest, ties to even; what is too large becomes infinite.
    fn encode(x: f32) -> Self;
    /// The same, but what is finite stays finite.
    fn saturate(x: f32) -> Self;
}

impl Half for bf16 {
    #[inline(always)]
    fn decode(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn encode(x: f32) -> Self {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        bf16::from_bits(if x.is_nan() { 0x7fc0 } else { rounded as u16 })
    }
    #[inline(always)]
    fn saturate(x: f32) -> Self {
        let h = bf16::encode(x).to_bits();
        bf16::from_bits(if h & 0x7fff == 0x7f80 && x.abs() < f32::INFINITY { h - 1 } else { h })
    }
}

impl Half for f16 {
    #[inline(always)]
    fn decode(self) -> f32 {
        let h = u32::from(self.to_bits());
        let magnitude = h & 0x7fff;
        // A subnormal is its fraction times 2^-24.
        let small = (magnitude as i32 as f32 * f32::from_bits(0x3380_0000)).to_bits();
        let large = (magnitude << 13) + if magnitude >= 0x7c00 { 0x7000_0000 } else { 0x3800_0000 };
        f32::from_bits((h & 0x8000) << 16 | if magnitude < 0x400 { small } else { large })
    }
    #[inline(always)]
    fn encode(x: f32) -> Self {
        let magnitude = x.to_bits() & 0x7fff_ffff;
        let sign = x.to_bits() >> 16 & 0x8000;
        let large = magnitude.wrapping_sub(0x3800_0000).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
        // The unit in the last place of 0.5 is that of a subnormal: the addition rounds.
        let small = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
        let finite = if magnitude < 0x3880_0000 { small } else { large };
        let h = sign | if magnitude >= 0x4780_0000 { 0x7c00 } else { finite };
        f16::from_bits(if magnitude > 0x7f80_0000 { 0x7e00 } else { h as u16 })
    }
    #[inline(always)]
    fn saturate(x: f32) -> Self {
        let h = f16::encode(x).to_bits();
        f16::from_bits(if h & 0x7fff == 0x7c00 && x.abs() < f32::INFINITY { h - 1 } else { h })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_codes_are_those_of_the_reference() {
        for bits in 0..=u16::MAX {
            let (h, b) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(h.is_nan() && Half::decode(h).is_nan() || Half::decode(h).to_bits() == h.to_f32_const().to_bits());
            assert!(b.is_nan() && Half::decode(b).is_nan() || Half::decode(b).to_bits() == b.to_f32_const().to_bits());
        }
        // Every high half, with low halves below, at and above each tie.
        let low = [0, 1, 0x0fff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xffff];
        for bits in (0..=u16::MAX).flat_map(|high| low.map(|low| u32::from(high) << 16 | low)) {
            let x = f32::from_bits(bits);
            let (h, b) = (f16::encode(x).to_bits(), bf16::encode(x).to_bits());
            if x.is_nan() {
                assert_eq!((h, b), (0x7e00, 0x7fc0));
            } else {
                assert_eq!(h, f16::from_f32_const(x).to_bits(), "{bits:#x}");
                assert_eq!(b, bf16::from_f32_const(x).to_bits(), "{bits:#x}");
            }
            let (h, b) = (f16::saturate(x).decode(), bf16::saturate(x).decode());
            assert_eq!((h.is_finite(), b.is_finite()), (x.is_finite(), x.is_finite()));
        }
        assert_eq!((f16::saturate(70000.0).to_bits(), f16::saturate(-1e9).to_bits()), (0x7bff, 0xfbff));
    }
}

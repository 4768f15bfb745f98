//! Stores that go past the caches. A long result is not there any more when it is read, and an ordinary store first
//! reads the line that it replaces: a third of the traffic of a sum of two.
use crate::memory::Address;

/// From how many bytes of one store on a fold's stores go past the caches: more than a core's own cache holds.
const FROM: usize = 4 << 20;
/// What a store past the caches is aligned to, in bytes.
pub(crate) const ALIGNED: usize = 16;

/// Whether a store of so many bytes should. Not where a source is replaced: its line was just read.
pub(crate) fn pays(store: Address, bytes: usize, sources: &[Address]) -> bool {
    let apart = sources.iter().all(|source| source.0 != store.0);
    cfg!(target_arch = "x86_64") && bytes >= FROM && store.0.addr().is_multiple_of(ALIGNED) && apart
}

/// Copies so many bytes past the caches.
///
/// # Safety
/// As for [`std::ptr::copy_nonoverlapping`]; `to` is aligned to 16 bytes; and [`done`] follows before others read it.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    let mut copied = 0;
    #[cfg(target_arch = "x86_64")]
    while copied + ALIGNED <= bytes {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
        let (from, to): (*const __m128i, *mut __m128i) =
            (from.wrapping_add(copied).cast(), to.wrapping_add(copied).cast());
        // SAFETY: this function's contract; `copied` is a multiple of the alignment. Every x86-64 has SSE2.
        unsafe { _mm_stream_si128(to, _mm_loadu_si128(from)) }
        copied += ALIGNED;
    }
    // SAFETY: this function's contract.
    unsafe { to.wrapping_add(copied).copy_from_nonoverlapping(from.wrapping_add(copied), bytes - copied) }
}

/// Others see what was written past the caches as they see any other store.
pub(crate) fn done() {
    // SAFETY: every x86-64 has SSE.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_aligned_stores_that_replace_no_source_stream() {
        let at = |address: usize| Address(std::ptr::without_provenance_mut(address));
        assert_eq!(pays(at(64), FROM, &[at(0), at(1 << 30)]), cfg!(target_arch = "x86_64"));
        assert!(!pays(at(64), FROM - 1, &[at(0)]), "short");
        assert!(!pays(at(68), FROM, &[at(0)]), "not aligned");
        assert!(!pays(at(64), FROM, &[at(0), at(64)]), "in place");
    }
}

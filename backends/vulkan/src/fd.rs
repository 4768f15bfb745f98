//! File descriptors on their way into a driver and out of it: each has one owner at any time.
//!
//! A driver keeps the descriptor of an import that succeeds, and leaves the one of an import that fails to its caller.
//! That is the rule; but drivers are known to close the latter too. So an import is given a duplicate with a number
//! so high that nothing else gets it meanwhile, and whether it is still open afterwards can be asked.
use crate::{gpu::Gpu, queue::lock};
use allhands_contract::Result;
use ash::prelude::VkResult;
use rustix::io::{Errno, fcntl_dupfd_cloexec, fcntl_getfd};
use std::{
    os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    sync::Mutex,
};

/// Numbers from here on are free in most programs: the kernel hands out the lowest, and a usual limit is 1024.
const HIGH: RawFd = 768;

/// Calls `import` with a duplicate of `fd`, which is the driver's if that succeeds.
///
/// # Errors
/// [`Refused`](allhands_contract::Error::Refused) if there can be no duplicate. What the driver says is in the result.
pub(crate) fn give<T>(
    gpu: &Gpu,
    what: &'static str,
    fd: BorrowedFd<'_>,
    import: impl FnOnce(RawFd) -> VkResult<T>,
) -> Result<VkResult<T>> {
    // One at a time, or the number of one that was closed would be the next one's.
    static ONE: Mutex<()> = Mutex::new(());
    let _one = lock(&ONE);
    let copy = fcntl_dupfd_cloexec(fd, HIGH).or_else(|_| fcntl_dupfd_cloexec(fd, 0));
    let raw = copy.map_err(|e| gpu.refused(what, format!("no descriptor: {e}")))?.into_raw_fd();
    let answer = import(raw);
    if answer.is_err() {
        // SAFETY: it is only asked whether there is such a descriptor; if there is, it is the one from above.
        match fcntl_getfd(unsafe { BorrowedFd::borrow_raw(raw) }) {
            Err(Errno::BADF) => log::debug!("{}: to {what} failed, and its driver closed the descriptor", gpu.id),
            // SAFETY: the driver did not take it, so it is still the one from above, and nobody else's.
            _ => drop(unsafe { OwnedFd::from_raw_fd(raw) }),
        }
    }
    Ok(answer)
}

/// Takes over a descriptor that a driver gave. A driver without a device may give nothing, or the program's own
/// standard streams.
pub(crate) fn own(gpu: &Gpu, what: &'static str, fd: i32) -> Result<OwnedFd> {
    if fd < 3 {
        return Err(gpu.refused(what, format!("its driver said it had, and gave descriptor {fd}")));
    }
    // SAFETY: it is open, and ours: the call that gave it says so.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::instance::Instance;
    use ash::vk;
    use std::{fs::File, os::fd::AsFd, sync::Arc};

    #[test]
    fn a_descriptor_is_closed_once_whoever_closes_it() {
        let Ok(instance) = Instance::shared() else { return println!("not asked: there is no loader") };
        for physical in instance.physicals().unwrap() {
            let Ok(gpu) = Gpu::open(instance.clone(), physical, Arc::default(), None) else { continue };
            let file = File::open("/dev/null").unwrap();
            let is_open = |raw| std::fs::read_link(format!("/proc/self/fd/{raw}")).is_ok();
            let give = |keep: bool, ok: bool| {
                let given = give(&gpu, "test", file.as_fd(), |raw| {
                    if !keep {
                        // SAFETY: `give` lent it, to close it or not.
                        drop(unsafe { OwnedFd::from_raw_fd(raw) });
                    }
                    if ok { Ok(raw) } else { Err(vk::Result::ERROR_INVALID_EXTERNAL_HANDLE) }
                });
                given.unwrap()
            };
            let kept = give(true, true).unwrap();
            assert!(is_open(kept), "a driver that succeeded has it");
            // SAFETY: it was given away, to this test.
            drop(unsafe { OwnedFd::from_raw_fd(kept) });
            for keep in [true, false] {
                assert!(give(keep, false).is_err());
                assert!(!is_open(kept), "the lowest number from there on is free again");
            }
        }
    }
}

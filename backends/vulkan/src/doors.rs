//! Faults on purpose: for each call that may fail on some driver, a door that a test can shut.
//!
//! A device and its siblings share their doors. While none was ever shut, passing one is a relaxed atomic load.
use ash::vk;
use std::{
    collections::HashMap,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// A call of a driver that can be made to go wrong.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Door {
    /// Making a buffer and its memory.
    BufferCreate,
    /// Making a file descriptor of memory.
    Export,
    /// Making memory of a file descriptor or of host pages.
    Import,
    /// Making a timeline.
    TimelineCreate,
    /// Making a file descriptor of a timeline.
    TimelineExport,
    /// Making a timeline of a file descriptor.
    TimelineImport,
    /// Submitting.
    Submit,
    /// Waiting for a timeline.
    Wait,
}

/// How it goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The driver says so, and has done nothing.
    Fail(vk::Result),
    /// The call does not return until the door is opened.
    Stall,
    /// It succeeds and is not what it says: imported memory has other bytes than the exporter's, an imported timeline
    /// never moves. On other doors it does nothing.
    Lie,
}

/// The doors of a device and of its siblings.
#[derive(Default)]
pub struct Doors {
    used: AtomicBool,
    memfd: AtomicBool,
    shut: Mutex<HashMap<Door, Fault>>,
    opened: Condvar,
}

impl Doors {
    /// Has `door` go wrong from now on.
    pub fn shut(&self, door: Door, fault: Fault) {
        self.lock().insert(door, fault);
        self.used.store(true, Ordering::Relaxed);
    }
    /// Has `door` go right again; what stalls at it goes on.
    pub fn open(&self, door: Door) {
        self.lock().remove(&door);
        self.opened.notify_all();
    }
    /// Whether a memfd passes for a dma-buf, for drivers that take one: the path can then be tested on machines where
    /// nothing makes dma-bufs.
    pub fn accept_memfd_as_dma_buf(&self, accept: bool) {
        self.memfd.store(accept, Ordering::Relaxed);
    }

    pub(crate) fn memfd(&self) -> bool {
        self.memfd.load(Ordering::Relaxed)
    }
    /// Goes through `door`; whether what comes after is to lie.
    pub(crate) fn pass(&self, door: Door) -> Result<bool, vk::Result> {
        if !self.used.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let mut shut = self.lock();
        loop {
            match shut.get(&door) {
                None => return Ok(false),
                Some(Fault::Lie) => return Ok(true),
                Some(Fault::Fail(why)) => return Err(*why),
                Some(Fault::Stall) => shut = self.opened.wait(shut).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
    fn lock(&self) -> MutexGuard<'_, HashMap<Door, Fault>> {
        self.shut.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Faults on purpose: for each call that may fail on some driver, a door that a test can shut.
//!
//! A device and its siblings share their doors. While none was ever shut, passing one is a relaxed atomic load.
use ash::vk;
use std::{
    collections::HashMap,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
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
    shut: Mutex<HashMap<Door, Shut>>,
    opened: Condvar,
    hits: AtomicU64,
}

struct Shut {
    fault: Fault,
    /// Calls that still go right first.
    skip: u32,
    /// Calls that go wrong then.
    times: u32,
}

impl Doors {
    /// Has `door` go wrong from now on.
    pub fn shut(&self, door: Door, fault: Fault) {
        self.insert(door, Shut { fault, skip: 0, times: u32::MAX });
    }
    /// Has `door` go wrong once, after it went right `skip` times.
    pub fn shut_once(&self, door: Door, fault: Fault, skip: u32) {
        self.insert(door, Shut { fault, skip, times: 1 });
    }
    /// Has `door` go right again; what stalls at it goes on.
    pub fn open(&self, door: Door) {
        self.lock().remove(&door);
        self.opened.notify_all();
    }
    /// How many calls went wrong so far.
    pub fn hits(&self) -> u64 {
        self.hits.load(Ordering::Relaxed)
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
        let Some(door_shut) = shut.get_mut(&door) else { return Ok(false) };
        if door_shut.skip > 0 || door_shut.times == 0 {
            door_shut.skip = door_shut.skip.saturating_sub(1);
            return Ok(false);
        }
        door_shut.times -= 1;
        let fault = door_shut.fault;
        self.hits.fetch_add(1, Ordering::Relaxed);
        match fault {
            Fault::Lie => Ok(true),
            Fault::Fail(why) => Err(why),
            Fault::Stall => {
                let opened = self.opened.wait_while(shut, |shut| shut.contains_key(&door));
                drop(opened.unwrap_or_else(PoisonError::into_inner));
                Ok(false)
            }
        }
    }
    fn insert(&self, door: Door, shut: Shut) {
        self.lock().insert(door, shut);
        self.used.store(true, Ordering::Relaxed);
    }
    fn lock(&self) -> MutexGuard<'_, HashMap<Door, Shut>> {
        self.shut.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

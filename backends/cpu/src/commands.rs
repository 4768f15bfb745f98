//! Operations, checked once and resolved to addresses, so that running them looks nothing up.
use crate::{
    kernels::{self, Fold, Ranges},
    memory::{Address, Buffer},
    stream,
    wire::Place,
};
use allhands_contract::{BufferId, DeviceId, Error, Kernel, Limits, Memory, Op, Range, Result, check_ops};
use std::sync::Arc;

/// Prepared commands. Barriers are gone: the steps run one after the other.
pub(crate) struct Commands {
    pub steps: Vec<Step>,
    /// What keeps the steps' addresses mapped.
    _buffers: Vec<Arc<Buffer>>,
}

/// One copy or kernel, and the paths that it takes.
pub(crate) struct Step {
    work: Work,
    /// Bytes of imported memory that it reads and writes.
    pub crossing: u64,
    /// Whether it touches imported memory.
    pub imports: bool,
    /// Whether it is a copy out of memory that others write.
    pub carries: bool,
}

enum Work {
    Copy { from: Address, to: Address, bytes: usize },
    Fold { run: Fold, ranges: Ranges, bytes: Vec<usize> },
}

impl Commands {
    /// Checks `ops` and resolves them; `find` answers for live buffers of the device and refuses others. `inline`:
    /// every copy carries.
    pub fn new(
        device: DeviceId,
        limits: &Limits,
        ops: &[Op],
        inline: bool,
        find: impl Fn(BufferId) -> Result<Arc<Buffer>>,
    ) -> Result<Self> {
        check_ops(device, limits, ops, |id| find(id).map(|b| b.size))?;
        let mut steps = Vec::new();
        let mut buffers = Vec::new();
        for op in ops {
            let (reads, writes) = op.accesses();
            let (mut crossing, mut imports, mut shared) = (0, false, inline);
            let mut resolve = |range: &Range| -> Result<(Address, Memory)> {
                let buffer = find(range.buffer)?;
                crossing += if buffer.imported { range.size } else { 0 };
                imports |= buffer.imported;
                let resolved = (buffer.at(range.offset), buffer.memory);
                buffers.push(buffer);
                Ok(resolved)
            };
            let work = match op {
                Op::Acquire { .. } | Op::Release { .. } | Op::Barrier => continue,
                Op::Copy { src, dst } => {
                    let ((from, memory), (to, _)) = (resolve(src)?, resolve(dst)?);
                    shared |= matches!(memory, Memory::Mapped | Memory::Upload);
                    Work::Copy { from, to, bytes: src.size as usize }
                }
                Op::Kernel(kernel) => {
                    let mut bind = |ranges: &[Range]| {
                        let bindable = |(address, memory)| match memory {
                            Memory::Device | Memory::Mapped => Ok(address),
                            Memory::Upload | Memory::Download => Err(unbindable(device, memory)),
                        };
                        ranges.iter().map(|r| resolve(r).and_then(bindable)).collect::<Result<Vec<_>>>()
                    };
                    let (sources, stores) = (bind(reads)?, bind(writes)?);
                    fold(device, kernel, stores, sources)?
                }
            };
            let carries = shared && matches!(work, Work::Copy { .. });
            steps.push(Step { work, crossing, imports, carries });
        }
        Ok(Commands { steps, _buffers: buffers })
    }
}

fn fold(device: DeviceId, kernel: &Kernel, stores: Vec<Address>, sources: Vec<Address>) -> Result<Work> {
    let &Kernel { op, dtype, finish, ref wire, .. } = kernel;
    if finish == Some(0) {
        return Err(Error::Invalid { device, what: "a kernel that finishes a reduction over 0 ranks".into() });
    }
    let wire = wire.as_ref();
    let run = kernels::find(op, dtype, wire.map(|w| w.dtype)).ok_or(Error::NoKernel { device, op, dtype })?;
    let bytes: Vec<usize> = kernel.stores.iter().map(|r| r.size as usize).collect();
    let place = |(i, start): (usize, &Address), narrow: Option<&[bool]>| Place {
        start: *start,
        narrow: narrow.is_some_and(|n| n[i]),
        streams: false,
    };
    let store = |(i, start): (usize, &Address)| {
        let streams = stream::pays(*start, bytes[i], &sources);
        Place { streams, ..place((i, start), wire.map(|w| &w.stores[..])) }
    };
    let ranges = Ranges {
        stores: stores.iter().enumerate().map(store).collect(),
        sources: sources.iter().enumerate().map(|s| place(s, wire.map(|w| &w.sources[..]))).collect(),
        scales: kernel.scales.clone(),
        count: kernel.elements() as usize,
        finish,
    };
    Ok(Work::Fold { run, ranges, bytes })
}

fn unbindable(device: DeviceId, memory: Memory) -> Error {
    Error::Invalid { device, what: format!("a kernel binds {memory:?} memory; copy it to Device or Mapped memory") }
}

impl Step {
    /// Whether it is a copy; else it is a kernel.
    pub fn is_copy(&self) -> bool {
        matches!(self.work, Work::Copy { .. })
    }
    /// Does it.
    ///
    /// # Safety
    /// Its commands are alive, and its turn in the queue has come: what it reads and writes is as the callers of
    /// the contract ordered it.
    pub unsafe fn run(&self) {
        match &self.work {
            // SAFETY: the range is inside its buffer, which the commands keep mapped; source and target are
            // checked not to overlap within a buffer, and nobody else writes either before this is signalled.
            Work::Copy { from, to, bytes } => unsafe { std::ptr::copy(from.0, to.0, *bytes) },
            // SAFETY: as above for every range; the checks before also grant a source and apart stores.
            Work::Fold { run, ranges, .. } => unsafe { run(ranges) },
        }
    }
    /// Puts zeros where it would have written.
    ///
    /// # Safety
    /// As for `run`.
    pub unsafe fn zero(&self) {
        for (to, bytes) in self.targets() {
            // SAFETY: what it may write with anything it may write with zeros.
            unsafe { to.0.write_bytes(0, bytes) }
        }
    }
    /// Flips a bit in the middle of what it wrote.
    ///
    /// # Safety
    /// As for `run`.
    pub unsafe fn corrupt(&self) {
        for (to, bytes) in self.targets().into_iter().filter(|t| t.1 > 0) {
            let middle = to.0.wrapping_add(bytes / 2);
            // SAFETY: the byte is inside a range that it may write, and wrote.
            unsafe { middle.write(middle.read() ^ 1) }
        }
    }

    fn targets(&self) -> Vec<(Address, usize)> {
        match &self.work {
            Work::Copy { to, bytes, .. } => vec![(*to, *bytes)],
            Work::Fold { ranges, bytes, .. } => {
                ranges.stores.iter().map(|s| s.start).zip(bytes.iter().copied()).collect()
            }
        }
    }
}

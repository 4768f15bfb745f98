//! What a device is asked to do.
use crate::{BufferId, DataType, DeviceId, Error, Limits, Range, ReduceOp, Result};

/// Who else writes or reads a range.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Domain {
    /// The host.
    Host,
    /// Another physical device or another driver.
    Foreign,
    /// Another device handle of the same physical device and driver.
    External,
}

/// `store[i] = finish(fold(sources[0][i], sources[1][i], ...))` for every store: in the order of the sources,
/// rounded once, by the rules of [`ReduceOp`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Kernel {
    /// Where the result goes; all of one size.
    pub stores: Vec<Range>,
    /// What is folded, in this order; each of the stores' size. A source may be exactly a store; any other overlap
    /// is refused.
    pub sources: Vec<Range>,
    /// The reduction.
    pub op: ReduceOp,
    /// The type of every element.
    pub dtype: DataType,
    /// `Some(ranks)` on the last fold of a reduction: [`ReduceOp::Average`] then divides. Other operations ignore it.
    pub finish: Option<u32>,
}

/// One operation of a command list. Operations between two [`Op::Barrier`]s are independent of each other and run in
/// any order; what follows a barrier sees all that came before it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Op {
    /// Another wrote `range`: make its writes visible to what follows. Stands before the first use in the list.
    Acquire {
        /// The bytes.
        range: Range,
        /// Who wrote them.
        from: Domain,
    },
    /// Another will read `range`: make our writes visible to it. Stands after the last use in the list.
    Release {
        /// The bytes.
        range: Range,
        /// Who reads them.
        to: Domain,
    },
    /// Moves bytes. The ranges are of one size and do not overlap.
    Copy {
        /// From.
        src: Range,
        /// To.
        dst: Range,
    },
    /// Reduces.
    Kernel(Kernel),
    /// Orders all before it ahead of all after it, and makes the writes visible.
    Barrier,
}

impl Op {
    /// The ranges it reads and those it writes. An acquire or a release counts as neither.
    pub fn accesses(&self) -> (&[Range], &[Range]) {
        use std::slice::from_ref;
        match self {
            Op::Copy { src, dst } => (from_ref(src), from_ref(dst)),
            Op::Kernel(k) => (&k.sources, &k.stores),
            Op::Acquire { .. } | Op::Release { .. } | Op::Barrier => (&[], &[]),
        }
    }
}

/// What every backend checks before it prepares `ops`, so that each refuses the same lists with the same words:
/// ranges inside their buffers (`size_of` answers for live buffers of this device, and refuses others), sizes,
/// overlap, granularity, and kernels that the device has.
pub fn check_ops(
    device: DeviceId,
    limits: &Limits,
    ops: &[Op],
    mut size_of: impl FnMut(BufferId) -> Result<u64>,
) -> Result<()> {
    let invalid = |what: String| Err(Error::Invalid { device, what });
    let mut group: Vec<(Range, bool, usize)> = Vec::new(); // accesses since the last barrier: range, written, op
    for (index, op) in ops.iter().enumerate() {
        if let Op::Barrier = op {
            group.clear();
            continue;
        }
        let (reads, writes) = op.accesses();
        let mentioned = match op {
            Op::Acquire { range, .. } | Op::Release { range, .. } => std::slice::from_ref(range),
            _ => &[],
        };
        for range in reads.iter().chain(writes).chain(mentioned) {
            let size = size_of(range.buffer)?;
            if range.offset.checked_add(range.size).is_none_or(|end| end > size) {
                return Err(Error::OutOfRange { device, range: *range, size });
            }
        }
        let granularity = match op {
            Op::Copy { src, dst } => {
                if src.size != dst.size {
                    return invalid(format!("a copy of {} bytes into {} bytes", src.size, dst.size));
                }
                if src.overlaps(dst) {
                    return Err(Error::Overlap { device, a: *src, b: *dst });
                }
                limits.copy_granularity
            }
            Op::Kernel(k) => {
                check_kernel(device, limits, k)?;
                limits.write_granularity.max(k.dtype.size())
            }
            _ => 1,
        };
        for range in reads.iter().chain(writes) {
            if range.offset % granularity != 0 || range.size % granularity != 0 {
                return invalid(format!(
                    "offset {} and size {} of a range must be multiples of {granularity} bytes",
                    range.offset, range.size
                ));
            }
        }
        for (range, written) in reads.iter().map(|r| (r, false)).chain(writes.iter().map(|r| (r, true))) {
            if let Some((other, ..)) =
                group.iter().find(|(r, w, i)| (*w || written) && *i != index && r.overlaps(range))
            {
                return Err(Error::Overlap { device, a: *other, b: *range });
            }
            group.push((*range, written, index));
        }
    }
    Ok(())
}

fn check_kernel(device: DeviceId, limits: &Limits, k: &Kernel) -> Result<()> {
    let invalid = |what: String| Err(Error::Invalid { device, what });
    if !limits.reduces(k.op, k.dtype) {
        return Err(Error::NoKernel { device, op: k.op, dtype: k.dtype });
    }
    let Some(size) = k.stores.first().map(|r| r.size) else {
        return invalid("a kernel that stores nothing".into());
    };
    if k.sources.is_empty() || k.sources.len() > limits.max_sources as usize {
        return invalid(format!("{} sources in one kernel; 1 to {} are possible", k.sources.len(), limits.max_sources));
    }
    if size / k.dtype.size() > limits.max_kernel_elements {
        return invalid(format!(
            "{} elements in one kernel; at most {} are possible",
            size / k.dtype.size(),
            limits.max_kernel_elements
        ));
    }
    let mut buffers: Vec<BufferId> = k.stores.iter().chain(&k.sources).map(|r| r.buffer).collect();
    buffers.sort();
    buffers.dedup();
    if buffers.len() > limits.max_bindings as usize {
        return invalid(format!(
            "{} buffers in one kernel; at most {} are possible",
            buffers.len(),
            limits.max_bindings
        ));
    }
    if let Some(other) = k.stores.iter().chain(&k.sources).find(|r| r.size != size) {
        return invalid(format!("a kernel over ranges of {size} and of {} bytes", other.size));
    }
    for (i, store) in k.stores.iter().enumerate() {
        let clash = k.stores[..i].iter().chain(k.sources.iter().filter(|s| *s != store)).find(|r| r.overlaps(store));
        if let Some(other) = clash {
            return Err(Error::Overlap { device, a: *store, b: *other });
        }
    }
    Ok(())
}

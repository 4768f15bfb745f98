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
#[derive(Clone, PartialEq, Debug)]
pub struct Kernel {
    /// Where the result goes; all of as many elements.
    pub stores: Vec<Range>,
    /// What is folded, in this order; each of the stores' length. A source may be exactly a store; any other overlap
    /// is refused.
    pub sources: Vec<Range>,
    /// The reduction.
    pub op: ReduceOp,
    /// The type of every element, but for those that [`wire`](Self::wire) names.
    pub dtype: DataType,
    /// `Some(ranks)` on the last fold of a reduction: [`ReduceOp::Average`] then divides. Other operations ignore it.
    pub finish: Option<u32>,
    /// What each source is multiplied by; empty: none is. A product is rounded to the accumulator's type before it is
    /// added, never fused. Only for [`ReduceOp::Sum`] of a float.
    pub scales: Vec<f32>,
    /// f32 that crosses as a narrower type. Only where the device has the operation for both types.
    pub wire: Option<Wire>,
}

/// How f32 crosses as a narrower type: every source is rounded to it before anything else, the result before it is
/// stored. What is too large becomes the greatest finite value; infinities stay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wire {
    /// [`DataType::F16`] or [`DataType::Bf16`].
    pub dtype: DataType,
    /// Which stores hold elements of it; the others hold f32.
    pub stores: Vec<bool>,
    /// Which sources do.
    pub sources: Vec<bool>,
}

impl Kernel {
    /// Elements of a store. Of narrow ranges alone, as many as their whole units hold.
    pub fn elements(&self) -> u64 {
        let exact = self.ranges().find(|(_, dtype)| *dtype == self.dtype);
        exact.or_else(|| self.ranges().next()).map_or(0, |(range, dtype)| range.size / dtype.size())
    }
    /// Every range with the type of its elements: stores, then sources.
    pub fn ranges(&self) -> impl Iterator<Item = (&Range, DataType)> {
        let narrow = |list: fn(&Wire) -> &[bool], i: usize| {
            self.wire.as_ref().filter(|w| list(w).get(i) == Some(&true)).map_or(self.dtype, |w| w.dtype)
        };
        let stores = self.stores.iter().enumerate().map(move |(i, r)| (r, narrow(|w| &w.stores, i)));
        stores.chain(self.sources.iter().enumerate().map(move |(i, r)| (r, narrow(|w| &w.sources, i))))
    }
}

/// One operation of a command list. Operations between two [`Op::Barrier`]s are independent of each other and run in
/// any order; what follows a barrier sees all that came before it.
#[derive(Clone, PartialEq, Debug)]
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
                k.ranges().try_for_each(|(r, dtype)| whole(device, r, limits.write_granularity.max(dtype.size())))?;
                1
            }
            _ => 1,
        };
        reads.iter().chain(writes).try_for_each(|r| whole(device, r, granularity))?;
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

/// Whether a range is of whole units.
fn whole(device: DeviceId, range: &Range, unit: u64) -> Result<()> {
    let Range { offset, size, .. } = range;
    if offset % unit == 0 && size % unit == 0 {
        return Ok(());
    }
    let what = format!("offset {offset} and size {size} of a range must be multiples of {unit} bytes");
    Err(Error::Invalid { device, what })
}

fn check_kernel(device: DeviceId, limits: &Limits, k: &Kernel) -> Result<()> {
    let invalid = |what: String| Err(Error::Invalid { device, what });
    if !limits.reduces(k.op, k.dtype) {
        return Err(Error::NoKernel { device, op: k.op, dtype: k.dtype });
    }
    if k.stores.is_empty() {
        return invalid("a kernel that stores nothing".into());
    }
    if k.sources.is_empty() || k.sources.len() > limits.max_sources as usize {
        return invalid(format!("{} sources in one kernel; 1 to {} are possible", k.sources.len(), limits.max_sources));
    }
    if !k.scales.is_empty() {
        if k.op != ReduceOp::Sum || !k.dtype.is_float() {
            return invalid(format!("scales for {} of {}; only sums of floats have them", k.op, k.dtype));
        }
        if k.scales.len() != k.sources.len() {
            return invalid(format!("{} scales for {} sources", k.scales.len(), k.sources.len()));
        }
    }
    if let Some(wire) = &k.wire {
        let dtype = wire.dtype;
        if k.dtype != DataType::F32 || !matches!(dtype, DataType::F16 | DataType::Bf16) {
            return invalid(format!("{} that crosses as {dtype}; f32 crosses as f16 or bf16", k.dtype));
        }
        if !limits.reduces(k.op, dtype) {
            return Err(Error::NoKernel { device, op: k.op, dtype });
        }
        if (wire.stores.len(), wire.sources.len()) != (k.stores.len(), k.sources.len()) {
            return invalid("a wire that does not name the type of every range".into());
        }
    }
    let elements = k.elements();
    if elements > limits.max_kernel_elements {
        let most = limits.max_kernel_elements;
        return invalid(format!("{elements} elements in one kernel; at most {most} are possible"));
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
    let size = k.stores[0].size;
    for (range, dtype) in k.ranges() {
        let exact = elements * dtype.size();
        // Narrow ranges are of whole units, whatever the number of their elements.
        let room = if dtype == k.dtype { exact } else { exact.next_multiple_of(limits.write_granularity) };
        if range.size != exact && range.size != room {
            return invalid(format!("a kernel over ranges of {size} and of {} bytes", range.size));
        }
    }
    let all: Vec<_> = k.ranges().collect();
    for (i, store) in all[..k.stores.len()].iter().enumerate() {
        let others = all[..i].iter().chain(all[k.stores.len()..].iter().filter(|source| *source != store));
        if let Some((other, _)) = others.into_iter().find(|(r, _)| r.overlaps(store.0)) {
            return Err(Error::Overlap { device, a: *store.0, b: **other });
        }
    }
    Ok(())
}

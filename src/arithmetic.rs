//! Whether a device's kernels keep the rules of [`ReduceOp`]: a self-test with values at which other arithmetic shows.
//!
//! It runs on a throwaway device, a submission for each floating-point type that has kernels: about a millisecond
//! and the time to compile a kernel for each operation. Its verdict stands for every device of the same backend,
//! name, driver and kernels, and is made once in a process. A device that breaks a rule for a type does not reduce that
//! type: the host does, for every rank. Flushed subnormals of f32 and bf16 alone are only told: there are devices
//! that cannot keep them.
use crate::{
    cache::kind,
    contract::{
        BufferDesc, DataType, Device, Error, Kernel, Memory, Op, Point, Range, ReduceOp, Result, Submission, Waited,
    },
};
use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// What the self-test looks at.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Property {
    /// Results are the nearest value, of two as near the even one, and are rounded once.
    Rounding,
    /// Contributions are added in the order of the ranks.
    Order,
    /// A product is rounded before it is added to, or a sum before it is multiplied: nothing is fused.
    Contraction,
    /// A NaN gives a NaN, the canonical one.
    Nan,
    /// -0 is kept, and is below +0.
    SignedZero,
    /// Infinities are kept, and overflow gives one.
    Infinity,
    /// Subnormal contributions count.
    SubnormalInput,
    /// Subnormal results are kept.
    SubnormalOutput,
}

impl Property {
    /// Every property, in the order in which tables list them.
    pub const ALL: [Property; 8] = {
        use Property::*;
        [Rounding, Order, Contraction, Nan, SignedZero, Infinity, SubnormalInput, SubnormalOutput]
    };
    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Property::Rounding => "rounding",
            Property::Order => "order",
            Property::Contraction => "contraction",
            Property::Nan => "nan",
            Property::SignedZero => "signed_zero",
            Property::Infinity => "infinity",
            Property::SubnormalInput => "subnormal_input",
            Property::SubnormalOutput => "subnormal_output",
        }
    }
    const fn is_of_subnormals(self) -> bool {
        matches!(self, Property::SubnormalInput | Property::SubnormalOutput)
    }
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What the self-test of a device found, for each floating-point type that it has kernels for.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Arithmetic {
    /// In the order of [`DataType::ALL`].
    pub verdicts: Vec<Verdict>,
}

/// What the self-test found for a type.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Verdict {
    /// The type.
    pub dtype: DataType,
    /// Each rule that is broken, with the first case that shows it.
    pub broken: Vec<(Property, String)>,
}

impl Verdict {
    /// Whether a rule is kept.
    pub fn keeps(&self, property: Property) -> bool {
        self.broken.iter().all(|(broken, _)| *broken != property)
    }
    /// Whether the device may reduce the type.
    pub fn is_sound(&self) -> bool {
        // The exponents of these two are the arithmetic unit's own: where it flushes, so do they.
        let may_flush = matches!(self.dtype, DataType::F32 | DataType::Bf16);
        self.broken.iter().all(|(property, _)| may_flush && property.is_of_subnormals())
    }
}

impl Arithmetic {
    /// Whether the device may reduce `dtype`. Integers are not in doubt.
    pub fn allows(&self, dtype: DataType) -> bool {
        self.verdicts.iter().all(|v| v.dtype != dtype || v.is_sound())
    }
}

/// A device that does not answer in this time fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// The verdict on `device`, made on `throwaway`, a device like it, unless one like it was tested before.
pub(crate) fn verdict(
    device: &dyn Device,
    throwaway: impl FnOnce() -> crate::Result<Arc<dyn Device>>,
) -> crate::Result<Arc<Arithmetic>> {
    type Key = (String, Vec<(ReduceOp, DataType)>);
    static KNOWN: Mutex<Option<HashMap<Key, Arc<Arithmetic>>>> = Mutex::new(None);
    let key = (kind(device), device.limits().kernels.clone());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(found) = known().get_or_insert_default().get(&key) {
        return Ok(found.clone());
    }
    let throwaway = throwaway()?;
    let mut arithmetic = Arithmetic::default();
    for dtype in DataType::ALL.into_iter().filter(|t| t.is_float()) {
        let ops: Vec<_> = ReduceOp::ALL.into_iter().filter(|op| throwaway.limits().reduces(*op, dtype)).collect();
        if !ops.is_empty() {
            let cases = cases(dtype).into_iter().filter(|c| ops.contains(&c.op)).collect();
            arithmetic.verdicts.push(test(&*throwaway, dtype, cases)?);
        }
    }
    for verdict in arithmetic.verdicts.iter().filter(|v| !v.is_sound()) {
        let why: Vec<_> = verdict.broken.iter().map(|(property, case)| format!("{property}: {case}")).collect();
        log::warn!("{} leaves {} to the host: {}", device.info().name, verdict.dtype, why.join("; "));
    }
    let arithmetic = Arc::new(arithmetic);
    known().get_or_insert_default().insert(key, arithmetic.clone());
    Ok(arithmetic)
}

/// A fold whose result tells one arithmetic from another. Values are bits.
struct Case {
    property: Property,
    op: ReduceOp,
    sources: Vec<u64>,
    /// Empty: nothing is scaled. The same in all cases of a type that have any.
    scales: Vec<f32>,
    want: u64,
}

/// What average divides by. Its reciprocal is no power of two.
const RANKS: u32 = 3;

/// Folds every case in one submission, cases of one operation in one kernel.
fn test(device: &dyn Device, dtype: DataType, cases: Vec<Case>) -> Result<Verdict> {
    let mut groups: BTreeMap<(ReduceOp, usize, bool), Vec<&Case>> = BTreeMap::new();
    for case in &cases {
        groups.entry((case.op, case.sources.len(), !case.scales.is_empty())).or_default().push(case);
    }
    let width = dtype.size() as usize;
    // Ranges start at multiples that every device binds at.
    let length = |group: &[&Case]| (group.len() * width).next_multiple_of(256) as u64;
    let read: u64 = groups.iter().map(|((_, sources, _), group)| *sources as u64 * length(group)).sum();
    let written: u64 = groups.values().map(|group| length(group)).sum();
    let make = |size| device.create_buffer(&BufferDesc { size, memory: Memory::Device, exportable: false });
    let (input, output, timeline) = (make(read)?, make(written)?, device.create_timeline(false)?);

    let mut data = vec![0_u8; read as usize];
    let (mut ops, mut at, mut to) = (Vec::new(), 0, 0);
    for ((op, sources, _), group) in &groups {
        let size = length(group);
        for source in 0..*sources {
            let start = at as usize + source * size as usize;
            for (case, element) in group.iter().zip(data[start..].chunks_mut(width)) {
                element.copy_from_slice(&case.sources[source].to_le_bytes()[..width]);
            }
        }
        ops.push(Op::Kernel(Kernel {
            stores: vec![Range::new(output, to, size)],
            sources: (0..*sources as u64).map(|s| Range::new(input, at + s * size, size)).collect(),
            op: *op,
            dtype,
            finish: Some(RANKS),
            scales: group[0].scales.clone(),
            wire: None,
        }));
        (at, to) = (at + *sources as u64 * size, to + size);
    }
    let mut result = vec![0_u8; written as usize];
    let mut run = || -> Result<()> {
        device.write(Range::new(input, 0, read), &data)?;
        let (commands, signal) = (device.prepare(&ops)?, Point { timeline, value: 1 });
        device.submit(&[Submission { commands: Some(commands), waits: &[], signal }])?;
        let deadline = Instant::now() + PATIENCE;
        while device.wait_any(&[signal], device.wakes(), deadline)? != Waited::Reached {
            if Instant::now() > deadline {
                let why = format!("it was not done after {PATIENCE:?}");
                return Err(Error::Refused { device: device.info().id, what: "run the arithmetic self-test", why });
            }
        }
        if device.limits().resubmit {
            device.destroy_commands(commands);
        }
        device.read(Range::new(output, 0, written), &mut result)
    };
    let ran = run();
    device.destroy_buffer(input);
    device.destroy_buffer(output);
    device.destroy_timeline(timeline);
    ran?;

    let mut verdict = Verdict { dtype, broken: Vec::new() };
    let mut at = 0;
    for group in groups.values() {
        for (case, element) in group.iter().zip(result[at..].chunks(width)) {
            let got = element.iter().rev().fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte));
            verdict.note(case, got);
        }
        at += length(group) as usize;
    }
    verdict.broken.sort_by_key(|(property, _)| *property);
    Ok(verdict)
}

impl Verdict {
    fn note(&mut self, case: &Case, got: u64) {
        // What is lost altogether was flushed; what is another value was rounded wrong.
        let lost = got & !Format::of(self.dtype).neg(0) == 0;
        let property = if case.property.is_of_subnormals() && !lost { Property::Rounding } else { case.property };
        if got == case.want || !self.keeps(property) {
            return;
        }
        let digits = self.dtype.size() as usize * 2 + 2;
        let sources: Vec<_> = case.sources.iter().map(|bits| format!("{bits:#0digits$x}")).collect();
        let (op, sources) = (case.op, sources.join(", "));
        self.broken.push((property, format!("{op} of {sources}: got {got:#0digits$x}, want {:#0digits$x}", case.want)));
    }
}

/// An IEEE binary format, or bfloat16.
struct Format {
    mantissa: u32,
    exponent: u32,
    /// Bits after the point in the accumulator.
    accumulator: u32,
}

impl Format {
    fn of(dtype: DataType) -> Self {
        let (exponent, mantissa, accumulator) = match dtype {
            DataType::F16 => (5, 10, 23),
            DataType::Bf16 => (8, 7, 23),
            DataType::F64 => (11, 52, 52),
            _ => (8, 23, 23),
        };
        Format { mantissa, exponent, accumulator }
    }
    /// The exponent of the largest values.
    fn largest(&self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }
    /// The exponent of the least normal values.
    fn least(&self) -> i32 {
        1 - self.largest()
    }
    /// 2^e, which may be subnormal.
    fn pow2(&self, e: i32) -> u64 {
        match e - self.least() {
            normal @ 0.. => ((normal + 1) as u64) << self.mantissa,
            below => 1 << (self.mantissa as i32 + below),
        }
    }
    fn infinity(&self) -> u64 {
        ((1 << self.exponent) - 1) << self.mantissa
    }
    fn nan(&self) -> u64 {
        self.infinity() | 1 << (self.mantissa - 1)
    }
    fn neg(&self, bits: u64) -> u64 {
        bits ^ 1 << (self.exponent + self.mantissa)
    }
}

/// Adding one to the bits of a value gives the next larger one. Sums have a third source, -0 where two would do, so
/// that one kernel serves them all.
fn cases(dtype: DataType) -> Vec<Case> {
    use Property::*;
    let f = Format::of(dtype);
    let (m, pow2, neg) = (f.mantissa as i32, |e| f.pow2(e), |bits| f.neg(bits));
    let (zero, one, infinity, nan) = (0, pow2(0), f.infinity(), f.nan());
    let (nothing, max) = (neg(zero), infinity - 1);
    let (top, bottom) = (f.largest(), f.least());
    let half = pow2(-m - 1); // of the distance from 1 to the next
    let payload = neg(infinity | 5);
    // Apart by more than the accumulator holds, and within the range of every type.
    let (big, tiny) = if dtype == DataType::F64 { (pow2(30), pow2(-25)) } else { (pow2(15), pow2(-10)) };
    let sum = |property, sources: [u64; 3], want| (property, ReduceOp::Sum, sources.to_vec(), want);
    let two = |property, op, a, b, want| (property, op, vec![a, b], want);
    use ReduceOp::{Average, Max, Min, Product};
    let mut list = vec![
        sum(Rounding, [one, half, nothing], one),
        sum(Rounding, [one + 1, half, nothing], one + 2),
        sum(Rounding, [one, half + 1, nothing], one + 1),
        sum(Rounding, [neg(one), neg(half), nothing], neg(one)),
        sum(Rounding, [one, neg(pow2(-m - 2)), nothing], one),
        sum(Rounding, [max, pow2(top - m - 2), nothing], max),
        two(Rounding, Product, one + 1, one + 1, one + 2),
        two(Rounding, Product, one + 1, neg(one + 1), neg(one + 2)),
        sum(Order, [big, neg(big), tiny], tiny),
        sum(Order, [big, tiny, neg(big)], zero),
        sum(Nan, [infinity, neg(infinity), nothing], nan),
        sum(Nan, [payload, one, nothing], nan),
        sum(Nan, [one, one, payload], nan),
        two(Nan, Product, zero, infinity, nan),
        two(Nan, Product, one, payload, nan),
        two(Nan, Average, payload, one, nan),
        sum(SignedZero, [neg(zero), neg(zero), nothing], neg(zero)),
        sum(SignedZero, [one, neg(one), nothing], zero),
        two(SignedZero, Product, neg(zero), one, neg(zero)),
        sum(Infinity, [infinity, neg(max), nothing], infinity),
        sum(Infinity, [max, pow2(top - m - 1), nothing], infinity),
        two(Infinity, Product, max, neg(max), neg(infinity)),
        two(SubnormalInput, Product, pow2(bottom - m), pow2(m + 1), pow2(bottom + 1)),
        two(SubnormalOutput, Product, pow2(bottom), pow2(-1), pow2(bottom - 1)),
        two(SubnormalOutput, Product, neg(pow2(bottom) + 1), pow2(-1), neg(pow2(bottom - 1))),
        sum(SubnormalOutput, [pow2(bottom) + 1, neg(pow2(bottom)), nothing], pow2(bottom - m)),
    ];
    // What each takes of two: the one farther on its side.
    let least = pow2(bottom - m);
    for (op, far, near, zero_taken, subnormal) in
        [(Min, neg(one), one, neg(zero), neg(least)), (Max, one, neg(one), zero, least)]
    {
        let end = if op == Min { neg(infinity) } else { infinity };
        list.extend([
            two(Nan, op, payload, far, nan),
            two(Nan, op, far, payload, nan),
            two(SignedZero, op, zero, neg(zero), zero_taken),
            two(SignedZero, op, neg(zero), zero, zero_taken),
            two(Infinity, op, infinity, neg(infinity), end),
            two(SubnormalInput, op, zero, subnormal, subnormal),
            two(Rounding, op, near, far, far),
        ]);
    }
    if f.mantissa < f.accumulator {
        // Rounded to the element's type after each addition, both would be lost.
        list.push(sum(Rounding, [one, half, pow2(-m - 3)], one + 1));
    } else {
        // The sum is 1; fused, the half would still count: a third has a finer mantissa than 1.
        let third = match dtype {
            DataType::F64 => (1.0_f64 / 3.0).to_bits(),
            _ => (1.0_f32 / 3.0).to_bits().into(),
        };
        list.push(two(Contraction, Average, one, half, third));
    }
    let plain = |(property, op, sources, want)| Case { property, op, sources, scales: Vec::new(), want };
    let mut list: Vec<Case> = list.into_iter().map(plain).collect();
    // The product is rounded to what the other source takes away; fused, a little of it would be left.
    let (product, factor, scale) = match dtype {
        DataType::F64 => (one + (1 << 29) + 1, one + 1, 1.0 + f32::EPSILON),
        _ => (pow2(10), pow2(11) | 1 << (m - 1), 1.0 / 3.0), // 1024 = 3072 / 3
    };
    let (sources, scales) = (vec![neg(product), factor, nothing], vec![1.0, scale, 1.0]);
    list.push(Case { property: Contraction, op: ReduceOp::Sum, sources, scales, want: zero });
    list
}

#[cfg(test)]
mod tests {
    use super::*;
    use allhands_cpu::{CpuDevice, Options};

    /// The host is the reference: it keeps every rule, so the cases ask for what is right.
    #[test]
    fn the_host_is_sound() {
        let device = CpuDevice::open(Options::default()).unwrap();
        let arithmetic = verdict(&*device, || Ok(device.clone())).unwrap();
        assert!(arithmetic.verdicts.iter().any(|v| v.dtype == DataType::F32));
        for verdict in &arithmetic.verdicts {
            assert_eq!(verdict.broken, [], "{}", verdict.dtype);
        }
        assert_eq!(device.counters().allocated, 0);
    }

    /// In the cases of contraction, what is fused differs from what is not.
    #[test]
    fn fusing_shows() {
        for case in cases(DataType::F32).iter().filter(|c| c.property == Property::Contraction) {
            let x: Vec<f32> = case.sources.iter().map(|b| f32::from_bits(*b as u32)).collect();
            let (apart, fused) = match case.scales[..] {
                [one, scale, _] => (x[0] * one + x[1] * scale, x[1].mul_add(scale, x[0] * one)),
                _ => ((x[0] + x[1]) * (1.0 / 3.0), x[1].mul_add(1.0 / 3.0, x[0] * (1.0 / 3.0))),
            };
            assert_eq!((apart.to_bits(), fused == apart), (case.want as u32, false), "{:?}", case.op);
        }
        for case in cases(DataType::F64).iter().filter(|c| c.property == Property::Contraction) {
            let x: Vec<f64> = case.sources.iter().map(|b| f64::from_bits(*b)).collect();
            let (apart, fused) = match case.scales[..] {
                [_, scale, _] => (x[0] + x[1] * f64::from(scale), x[1].mul_add(scale.into(), x[0])),
                _ => ((x[0] + x[1]) * (1.0 / 3.0), x[1].mul_add(1.0 / 3.0, x[0] * (1.0 / 3.0))),
            };
            assert_eq!((apart.to_bits(), fused == apart), (case.want, false), "{:?}", case.op);
        }
        for dtype in [DataType::F16, DataType::Bf16] {
            assert!(cases(dtype).iter().any(|c| c.property == Property::Contraction));
        }
    }

    /// In the cases of order, another order shows.
    #[test]
    fn another_order_shows() {
        for case in cases(DataType::F32).iter().filter(|c| c.property == Property::Order) {
            let mut x: Vec<f32> = case.sources.iter().map(|b| f32::from_bits(*b as u32)).collect();
            assert_eq!(x.iter().sum::<f32>().to_bits(), case.want as u32);
            x.swap(1, 2);
            assert_ne!(x.iter().sum::<f32>().to_bits(), case.want as u32);
        }
    }

    #[test]
    fn flushing_disqualifies_only_where_the_type_is_not_the_units_own() {
        for (dtype, sound) in
            [(DataType::F32, true), (DataType::Bf16, true), (DataType::F16, false), (DataType::F64, false)]
        {
            let case = cases(dtype).into_iter().find(|c| c.property == Property::SubnormalOutput).unwrap();
            let mut verdict = Verdict { dtype, broken: Vec::new() };
            verdict.note(&case, 0);
            assert_eq!((verdict.keeps(Property::SubnormalOutput), verdict.is_sound()), (false, sound), "{dtype}");
            verdict.note(&case, case.want + 1);
            assert!(!verdict.keeps(Property::Rounding) && !verdict.is_sound());
        }
    }
}

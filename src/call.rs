//! One call: what each local rank brings, and the checks that come before anything is written.
use crate::{
    Error, Result,
    contract::{self, BufferId, DataType, Device, Point, ReduceOp},
    plans::Form,
    schedule::{Collective, Shape},
    span::Span,
};
use std::sync::Arc;

/// The element types that can cross.
pub const TYPES: [DataType; 10] = DataType::ALL;

/// Whether calls of `dtype`, with the reduction `op` if there is one, are to be had: all are.
pub fn supported(_: Option<ReduceOp>, _: DataType) -> bool {
    true
}

/// Whether only a host worker can make `op` of `dtype`: integer average sums in 64 bits, so its partial sums do not
/// fit the elements that cross, and it takes one fold of all contributions.
pub(crate) fn needs_host(op: ReduceOp, dtype: DataType) -> bool {
    op == ReduceOp::Average && !dtype.is_float()
}

/// What a local rank brings to a call.
#[derive(Clone, Debug, Default)]
pub struct Part {
    spans: Spans,
    after: Vec<Point>,
    scale: Option<f32>,
    absent: bool,
}

#[derive(Clone, Debug, Default)]
enum Spans {
    #[default]
    None,
    InPlace(Span),
    Apart(Option<Span>, Option<Span>),
}

impl Part {
    /// Nothing: for a barrier, or a rank that neither gives nor gets.
    pub fn none() -> Self {
        Part::default()
    }
    /// Input and output lie apart (or exactly where in place puts them).
    pub fn new(input: Span, output: Span) -> Self {
        Part { spans: Spans::Apart(Some(input), Some(output)), ..Part::default() }
    }
    /// Only gives: a rank that is not the root of a reduce or a gather.
    pub fn input(input: Span) -> Self {
        Part { spans: Spans::Apart(Some(input), None), ..Part::default() }
    }
    /// Only gets: a rank that is not the root of a broadcast or a scatter.
    pub fn output(output: Span) -> Self {
        Part { spans: Spans::Apart(None, Some(output)), ..Part::default() }
    }
    /// One span that holds both, the smaller within the larger where [`Collective`] says.
    pub fn in_place(span: Span) -> Self {
        Part { spans: Spans::InPlace(span), ..Part::default() }
    }
    /// The data is not there before these points of timelines of the rank's device are reached.
    pub fn after(mut self, points: impl IntoIterator<Item = Point>) -> Self {
        self.after.extend(points);
        self
    }
    /// What the rank's contribution is multiplied by before it is added: the product is rounded to the accumulator's
    /// type (f32, and f64 for f64), and never fused with the addition. For sums of floats, by algorithms that fold the
    /// contributions themselves: one-shot, two-shot and host.
    pub fn scale(mut self, by: f32) -> Self {
        self.scale = Some(by);
        self
    }
    /// The rank contributes nothing to the reduction, whatever its memory holds, and needs no input; it receives the
    /// result like any other. The result has the bits that the fold of the others has; an average is still divided by
    /// the number of all ranks. If no rank contributes, it is 0 for a sum or an average, 1 for a product, and for a
    /// minimum or maximum the greatest or least value of the type (of a float: infinity).
    pub fn absent(mut self) -> Self {
        self.absent = true;
        self
    }
}

impl From<&crate::Buffer> for Part {
    fn from(buffer: &crate::Buffer) -> Self {
        Part::in_place(buffer.span())
    }
}
impl From<Span> for Part {
    fn from(span: Span) -> Self {
        Part::in_place(span)
    }
}

/// What is known of a rank's memory once a call is checked. In place, both are the one span.
#[derive(Clone, Debug)]
pub(crate) struct RankSpans {
    pub input: Span,
    pub output: Span,
    pub after: Vec<Point>,
}

/// A call in which nothing is wrong.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    pub shape: Shape,
    pub op: Option<ReduceOp>,
    pub dtype: DataType,
    pub ranks: Vec<RankSpans>,
    /// What each rank's contribution is multiplied by; empty: none is.
    pub scales: Vec<f32>,
    /// Which ranks contribute nothing; empty: all do something.
    pub absent: Vec<bool>,
    /// The type that f32 crosses as.
    pub wire: Option<DataType>,
    /// Which ranks' kernels keep off the caller's memory, because it is not of whole units; empty: none.
    pub staged: Vec<bool>,
}

impl Checked {
    /// What a plan of the call depends on, beside its shape.
    pub fn form(&self) -> Form {
        Form { narrow: self.wire.is_some(), staged: self.staged.clone(), direct: false }
    }
    /// Whether both are one call, over the same memory, whatever its ranks wait for.
    pub fn is_same(&self, other: &Checked) -> bool {
        let bits = |c: &Checked| c.scales.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
        let alike = |(a, b): (&RankSpans, &RankSpans)| a.input == b.input && a.output == b.output;
        self.shape == other.shape
            && (self.op, self.dtype, self.wire) == (other.op, other.dtype, other.wire)
            && (&self.absent, &self.staged) == (&other.absent, &other.staged)
            && bits(self) == bits(other)
            && self.ranks.iter().zip(&other.ranks).all(alike)
    }
    /// The same, waiting for nothing.
    pub fn without_points(&self) -> Checked {
        let mut call = self.clone();
        call.ranks.iter_mut().for_each(|rank| rank.after = Vec::new());
        call
    }
    /// Whether it is over this buffer.
    pub fn names(&self, buffer: BufferId) -> bool {
        self.ranks.iter().flat_map(|r| r.input.pieces.iter().chain(&r.output.pieces)).any(|p| p.buffer == buffer)
    }
    /// Bytes of an element in staging.
    pub fn staged_size(&self) -> u64 {
        self.wire.unwrap_or(self.dtype).size()
    }
    /// Whether only a fold of the contributions themselves, in the order of the ranks, will do.
    pub fn in_rank_order(&self) -> bool {
        self.op.is_some() && (!self.scales.is_empty() || self.wire.is_some())
    }
    /// Whether it takes one fold of all contributions: a partial sum, kept as an element, would be rounded.
    pub fn in_one_fold(&self) -> bool {
        let exact = matches!(self.op, None | Some(ReduceOp::Min | ReduceOp::Max));
        let narrow = matches!(self.dtype, DataType::F16 | DataType::Bf16) || self.wire.is_some();
        !self.scales.is_empty() || narrow && !exact
    }
    /// The bits of what a rank that contributes nothing brings instead: it changes no fold.
    pub fn neutral(&self) -> Vec<u8> {
        let none = self.absent.iter().all(|a| *a);
        let bits = neutral(self.op.unwrap_or(ReduceOp::Sum), self.dtype, none);
        bits.to_le_bytes()[..self.dtype.size() as usize].to_vec()
    }
    /// Bytes of `count` elements.
    pub fn bytes(&self) -> u64 {
        self.shape.count * self.dtype.size()
    }
}

/// Finds everything that can be wrong with a call. `devices`: of each rank, in order; all ranks are local, so what
/// needs all ranks' arguments is agreed upon here.
pub(crate) fn check(
    devices: &[Arc<dyn Device>],
    collective: Collective,
    op: Option<ReduceOp>,
    parts: Vec<Part>,
) -> Result<Checked> {
    check_wired(devices, collective, op, parts, None)
}

/// The same for f32 that crosses as `wire`.
pub(crate) fn check_wired(
    devices: &[Arc<dyn Device>],
    collective: Collective,
    op: Option<ReduceOp>,
    parts: Vec<Part>,
    wire: Option<DataType>,
) -> Result<Checked> {
    let ranks = devices.len() as u32;
    if parts.len() != devices.len() {
        return Err(Error::Parts { got: parts.len(), want: devices.len() });
    }
    check_roots(&collective, ranks)?;
    let name = collective.name();
    let dtype = agree_on_type(&parts)?;
    let op = if collective.reduces() {
        let op =
            op.ok_or_else(|| Error::Parse(format!("{name} needs a reduction: sum, product, min, max, average")))?;
        Some(op)
    } else {
        None
    };
    check_wire(wire, dtype, devices)?;
    let (scales, absent) = check_contributions(name, op, dtype, &parts)?;
    let mut shape = Shape { collective, ranks, count: 0, in_place: false };
    shape.count = agree_on_count(&shape, &parts, devices)?;
    let in_place = agree_on_place(&shape, &parts)?;
    shape.in_place = in_place;

    let mut spans = Vec::with_capacity(parts.len());
    for (r, part) in parts.into_iter().enumerate() {
        spans.push(check_spans(&shape, r as u32, &devices[r], part, dtype)?);
    }
    check_overlap(&shape, devices, &spans)?;
    for device in devices {
        device.status()?;
    }
    let mut checked = Checked { shape, op, dtype, ranks: spans, scales, absent, wire, staged: Vec::new() };
    checked.staged = staged(&checked, devices);
    Ok(checked)
}

fn check_wire(wire: Option<DataType>, dtype: DataType, devices: &[Arc<dyn Device>]) -> Result<()> {
    let Some(wire) = wire else { return Ok(()) };
    let option = |why: String| Err(Error::Option { what: "a wire type", why });
    if dtype != DataType::F32 || !matches!(wire, DataType::F16 | DataType::Bf16) {
        return option(format!("f32 can cross as f16 or bf16, and nothing else otherwise; this is {dtype} as {wire}"));
    }
    // What converts is a sum of one.
    let converts = |d: &&Arc<dyn Device>| [dtype, wire].iter().all(|t| d.limits().reduces(ReduceOp::Sum, *t));
    match devices.iter().find(|d| !converts(d)) {
        Some(device) => option(format!("{} has no kernel that converts", device.info().id)),
        None => Ok(()),
    }
}

/// Scales and absent ranks, each empty if there is none.
fn check_contributions(
    name: &str,
    op: Option<ReduceOp>,
    dtype: DataType,
    parts: &[Part],
) -> Result<(Vec<f32>, Vec<bool>)> {
    let any = |yes: fn(&Part) -> bool| parts.iter().any(yes);
    let (scaled, absent) = (any(|p| p.scale.is_some()), any(|p| p.absent));
    if absent && op.is_none() {
        return Err(Error::Option { what: "an absent rank", why: format!("{name} reduces nothing") });
    }
    if scaled && (op != Some(ReduceOp::Sum) || !dtype.is_float()) {
        let why = match op {
            Some(op) => format!("sums of floats have scales, and this is {op} of {dtype}"),
            None => format!("{name} reduces nothing"),
        };
        return Err(Error::Option { what: "a scale", why });
    }
    // What stands in for an absent rank is not to be changed.
    let scale = |p: &Part| p.scale.filter(|_| !p.absent).unwrap_or(1.0);
    let scales = if scaled { parts.iter().map(scale).collect() } else { Vec::new() };
    Ok((scales, if absent { parts.iter().map(|p| p.absent).collect() } else { Vec::new() }))
}

/// The ranks whose memory does not start and end with whole units of what their kernels write, or whose blocks do not.
pub(crate) fn staged(call: &Checked, devices: &[Arc<dyn Device>]) -> Vec<bool> {
    let one = |(rank, device): (&RankSpans, &Arc<dyn Device>)| {
        let unit = device.limits().write_granularity;
        let pieces = rank.input.pieces.iter().chain(&rank.output.pieces);
        let whole = |bytes: u64| bytes.is_multiple_of(unit);
        !whole(call.bytes()) || !pieces.into_iter().all(|p| whole(p.offset) && whole(p.size))
    };
    let staged: Vec<bool> = match call.op {
        Some(_) if call.dtype.size() < 4 => call.ranks.iter().zip(devices).map(one).collect(),
        _ => Vec::new(),
    };
    if staged.contains(&true) { staged } else { Vec::new() }
}

/// What folds of `op` do not change with. -0 is the sum's, for 0 would make 0 of it; but a sum of nothing is 0.
fn neutral(op: ReduceOp, dtype: DataType, nothing: bool) -> u64 {
    use DataType::*;
    let bits = dtype.size() * 8;
    let all = u64::MAX >> (64 - bits);
    let sign = 1 << (bits - 1);
    let (infinity, one) = match dtype {
        F16 => (0x7c00, 0x3c00),
        Bf16 => (0x7f80, 0x3f80),
        F32 => (0x7f80_0000, 0x3f80_0000),
        F64 => (0x7ff0 << 48, 0x3ff0 << 48),
        _ => (0, 1),
    };
    let signed = matches!(dtype, I8 | I32 | I64);
    match op {
        ReduceOp::Sum | ReduceOp::Average if dtype.is_float() && !nothing => sign,
        ReduceOp::Sum | ReduceOp::Average => 0,
        ReduceOp::Product => one,
        ReduceOp::Min if dtype.is_float() => infinity,
        ReduceOp::Max if dtype.is_float() => infinity | sign,
        ReduceOp::Min if signed => all ^ sign,
        ReduceOp::Max if signed => sign,
        ReduceOp::Min => all,
        ReduceOp::Max => 0,
    }
}

fn check_roots(collective: &Collective, ranks: u32) -> Result<()> {
    let out_of_range = match collective {
        Collective::SendRecv(list) => list.iter().flat_map(|t| [t.from, t.to]).find(|r| *r >= ranks),
        other => other.root().filter(|r| *r >= ranks),
    };
    out_of_range.map_or(Ok(()), |root| Err(Error::Root { root, ranks }))
}

fn given(part: &Part) -> impl Iterator<Item = &Span> {
    match &part.spans {
        Spans::None => [None, None],
        Spans::InPlace(s) => [Some(s), None],
        Spans::Apart(i, o) => [i.as_ref(), o.as_ref()],
    }
    .into_iter()
    .flatten()
}

fn agree_on_type(parts: &[Part]) -> Result<DataType> {
    let mut first: Option<(u32, DataType)> = None;
    for (r, part) in parts.iter().enumerate() {
        for span in given(part) {
            let this = (r as u32, span.dtype);
            match first {
                None => first = Some(this),
                Some(a) if a.1 != this.1 => return Err(Error::Types { a, b: this }),
                Some(_) => {}
            }
        }
    }
    // A barrier has no elements: any type will do.
    Ok(first.map_or(DataType::F32, |f| f.1))
}

/// The count, from the first rank whose spans tell it.
fn agree_on_count(shape: &Shape, parts: &[Part], devices: &[Arc<dyn Device>]) -> Result<u64> {
    let n = shape.ranks as u64;
    for (r, part) in parts.iter().enumerate() {
        // With a count of 1, a length is the factor between the count and the span.
        let one = Shape { count: 1, ..shape.clone() };
        let (input, output) = (one.input_len(r as u32), one.output_len(r as u32));
        let (len, factor) = match &part.spans {
            Spans::InPlace(s) => (s.len(), input.max(output)),
            Spans::Apart(Some(i), _) if input > 0 => (i.len(), input),
            Spans::Apart(_, Some(o)) if output > 0 => (o.len(), output),
            _ => continue,
        };
        if matches!(shape.collective, Collective::SendRecv(_)) || factor == 0 {
            continue;
        }
        if len % factor != 0 {
            let want = format!("a multiple of {n}, one block for each rank");
            return Err(Error::Length { rank: r as u32, device: devices[r].info().id, what: "span", got: len, want });
        }
        return Ok(len / factor);
    }
    Ok(0)
}

/// Whether the call is in place: given as one span, or as two that lie as one span would have them.
fn agree_on_place(shape: &Shape, parts: &[Part]) -> Result<bool> {
    if matches!(shape.collective, Collective::SendRecv(_) | Collective::Barrier) {
        return Ok(false);
    }
    let mut first: Option<(u32, bool)> = None;
    for (r, part) in parts.iter().enumerate() {
        let r = r as u32;
        if shape.input_len(r) == 0 || shape.output_len(r) == 0 {
            continue; // With one span only there is no place to be in.
        }
        let here = match &part.spans {
            Spans::InPlace(_) => true,
            Spans::Apart(Some(input), Some(output)) => lies_in_place(shape, r, input, output),
            _ => continue, // Reported as missing by the caller.
        };
        match first {
            None => first = Some((r, here)),
            Some((a, yes)) if yes != here => {
                return Err(Error::MixedInPlace { ranks: if yes { (a, r) } else { (r, a) } });
            }
            Some(_) => {}
        }
    }
    Ok(first.is_some_and(|f| f.1))
}

fn lies_in_place(shape: &Shape, rank: u32, input: &Span, output: &Span) -> bool {
    let (i, o, own) = (shape.input_len(rank), shape.output_len(rank), rank as u64 * shape.count);
    if input.len() != i || output.len() != o {
        return false; // Reported as a wrong length by the caller.
    }
    match i.cmp(&o) {
        std::cmp::Ordering::Equal => input.same_bytes(output),
        std::cmp::Ordering::Greater => input.slice(own, o).same_bytes(output),
        std::cmp::Ordering::Less => output.slice(own, i).same_bytes(input),
    }
}

fn check_spans(shape: &Shape, rank: u32, device: &Arc<dyn Device>, part: Part, dtype: DataType) -> Result<RankSpans> {
    let id = device.info().id;
    let (want_in, want_out) = (shape.input_len(rank), shape.output_len(rank));
    // In place, the memory of an absent rank is that of any other.
    let reads_in = if part.absent { 0 } else { want_in };
    let empty = || Span::new(dtype, []);
    let length = |what, span: &Span, want: u64| {
        let got = span.len();
        let wrong = || Error::Length { rank, device: id, what, got, want: want.to_string() };
        if got == want { Ok(()) } else { Err(wrong()) }
    };
    let missing = |what| Error::Missing { rank, device: id, what, collective: shape.collective.name() };
    let (input, output) = match part.spans {
        Spans::None if reads_in > 0 => return Err(missing("input")),
        Spans::None if want_out > 0 => return Err(missing("output")),
        Spans::None => (empty(), empty()),
        Spans::InPlace(span) => {
            length("buffer", &span, want_in.max(want_out))?;
            check_span(rank, device, "buffer", &span)?;
            (span.clone(), span)
        }
        Spans::Apart(input, output) => {
            if input.is_none() && reads_in > 0 {
                return Err(missing("input"));
            }
            if output.is_none() && want_out > 0 {
                return Err(missing("output"));
            }
            // A broadcast's or a scatter's other ranks may bring an input that nobody reads, and a reduce's or a
            // gather's an output that nobody writes: it is left alone.
            let whole = !part.absent || input.is_some();
            let input = input.filter(|_| want_in > 0).unwrap_or_else(empty);
            let output = output.filter(|_| want_out > 0).unwrap_or_else(empty);
            if whole {
                length("input", &input, want_in)?;
            } else if shape.in_place && want_out > 0 && want_in != want_out {
                return Err(missing("buffer")); // the output alone is less than where in place puts it
            }
            length("output", &output, want_out)?;
            check_span(rank, device, "input", &input)?;
            check_span(rank, device, "output", &output)?;
            if shape.in_place {
                let both = if whole && want_in >= want_out { input } else { output };
                (both.clone(), both)
            } else {
                (input, output)
            }
        }
    };
    for point in &part.after {
        if point.timeline.device != id {
            return Err(Error::Foreign { rank, device: id, what: "a point to wait for", other: point.timeline.device });
        }
        device.value(point.timeline)?;
    }
    Ok(RankSpans { input, output, after: part.after })
}

fn check_span(rank: u32, device: &Arc<dyn Device>, what: &'static str, span: &Span) -> Result<()> {
    let id = device.info().id;
    for piece in &span.pieces {
        if piece.buffer.device != id {
            return Err(Error::Foreign { rank, device: id, what, other: piece.buffer.device });
        }
        let size = match device.size(piece.buffer) {
            Ok(size) => size,
            Err(contract::Error::Stale { .. }) => return Err(Error::Dropped { rank, device: id, what }),
            Err(other) => return Err(other.into()),
        };
        if piece.offset.checked_add(piece.size).is_none_or(|end| end > size) {
            let source = contract::Error::OutOfRange { device: id, range: *piece, size };
            return Err(Error::Span { rank, source });
        }
        let align = span.dtype.size();
        if piece.offset % align != 0 || piece.size % align != 0 {
            return Err(Error::Misaligned { rank, device: id, offset: piece.offset, size: piece.size, align });
        }
    }
    Ok(())
}

/// No output lies over another span of the call.
fn check_overlap(shape: &Shape, devices: &[Arc<dyn Device>], spans: &[RankSpans]) -> Result<()> {
    let writes = |r: usize| shape.output_len(r as u32) > 0;
    for (r, mine) in spans.iter().enumerate().filter(|(r, _)| writes(*r)) {
        let overlap = |other: String| Error::Overlap { rank: r as u32, device: devices[r].info().id, other };
        if !shape.in_place && mine.output.overlaps(&mine.input) {
            return Err(overlap("its own input".into()));
        }
        for (i, piece) in mine.output.pieces.iter().enumerate() {
            if mine.output.pieces[..i].iter().any(|other| other.overlaps(piece)) {
                return Err(overlap("itself".into()));
            }
        }
        for (s, other) in spans.iter().enumerate().filter(|(s, _)| *s != r) {
            if mine.output.overlaps(&other.input) {
                return Err(overlap(format!("the input of rank {s}")));
            }
            if writes(s) && mine.output.overlaps(&other.output) {
                return Err(overlap(format!("the output of rank {s}")));
            }
        }
    }
    Ok(())
}

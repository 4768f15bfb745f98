//! One call: what each local rank brings, and the checks that come before anything is written.
use crate::{
    Error, Result,
    contract::{self, DataType, Device, Point, ReduceOp},
    schedule::{Collective, Shape},
    span::Span,
};
use std::sync::Arc;

/// The element types that can cross. (Narrower and wider ones come with their kernels and byte-exact borders.)
pub const TYPES: [DataType; 3] = [DataType::F32, DataType::I32, DataType::U32];

/// Whether calls of `dtype`, with the reduction `op` if there is one, are to be had.
pub fn supported(op: Option<ReduceOp>, dtype: DataType) -> bool {
    TYPES.contains(&dtype) && op.is_none_or(|op| ReduceOp::ALL.contains(&op))
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
        Part { spans: Spans::Apart(Some(input), Some(output)), after: Vec::new() }
    }
    /// Only gives: a rank that is not the root of a reduce or a gather.
    pub fn input(input: Span) -> Self {
        Part { spans: Spans::Apart(Some(input), None), after: Vec::new() }
    }
    /// Only gets: a rank that is not the root of a broadcast or a scatter.
    pub fn output(output: Span) -> Self {
        Part { spans: Spans::Apart(None, Some(output)), after: Vec::new() }
    }
    /// One span that holds both, the smaller within the larger where [`Collective`] says.
    pub fn in_place(span: Span) -> Self {
        Part { spans: Spans::InPlace(span), after: Vec::new() }
    }
    /// The data is not there before these points of timelines of the rank's device are reached.
    pub fn after(mut self, points: impl IntoIterator<Item = Point>) -> Self {
        self.after.extend(points);
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
}

impl Checked {
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
        if !supported(Some(op), dtype) {
            let have = TYPES.map(DataType::name).join(", ");
            return Err(Error::UnknownPair { op, dtype, why: format!("the types to reduce are {have}") });
        }
        Some(op)
    } else {
        None
    };
    if !supported(None, dtype) {
        return Err(Error::UnknownType { dtype });
    }
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
    Ok(Checked { shape, op, dtype, ranks: spans })
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
    let empty = || Span::new(dtype, []);
    let length = |what, span: &Span, want: u64| {
        let got = span.len();
        let wrong = || Error::Length { rank, device: id, what, got, want: want.to_string() };
        if got == want { Ok(()) } else { Err(wrong()) }
    };
    let missing = |what| Error::Missing { rank, device: id, what, collective: shape.collective.name() };
    let (input, output) = match part.spans {
        Spans::None if want_in > 0 => return Err(missing("input")),
        Spans::None if want_out > 0 => return Err(missing("output")),
        Spans::None => (empty(), empty()),
        Spans::InPlace(span) => {
            length("buffer", &span, want_in.max(want_out))?;
            check_span(rank, device, "buffer", &span)?;
            (span.clone(), span)
        }
        Spans::Apart(input, output) => {
            if input.is_none() && want_in > 0 {
                return Err(missing("input"));
            }
            if output.is_none() && want_out > 0 {
                return Err(missing("output"));
            }
            // A broadcast's or a scatter's other ranks may bring an input that nobody reads, and a reduce's or a
            // gather's an output that nobody writes: it is left alone.
            let input = input.filter(|_| want_in > 0).unwrap_or_else(empty);
            let output = output.filter(|_| want_out > 0).unwrap_or_else(empty);
            length("input", &input, want_in)?;
            length("output", &output, want_out)?;
            check_span(rank, device, "input", &input)?;
            check_span(rank, device, "output", &output)?;
            if shape.in_place {
                let both = if want_in >= want_out { input } else { output };
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

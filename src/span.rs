//! One logical range of elements over several physical buffers.
use crate::contract::{BufferId, DataType, Range};

/// Elements of one type, lying in one piece or in several that follow each other: a tensor whose pool has more than
/// one allocation is still one range to a caller. Pieces are bytes of buffers of one device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Span {
    /// Element type.
    pub dtype: DataType,
    /// The pieces, in order.
    pub pieces: Vec<Range>,
}

impl Span {
    /// The elements of `pieces`, one after the other.
    pub fn new(dtype: DataType, pieces: impl Into<Vec<Range>>) -> Self {
        Span { dtype, pieces: pieces.into() }
    }
    /// `count` elements of `buffer` from element `start`.
    pub fn of(buffer: BufferId, dtype: DataType, start: u64, count: u64) -> Self {
        Span::new(dtype, [Range::new(buffer, start * dtype.size(), count * dtype.size())])
    }
    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.pieces.iter().map(|p| p.size).sum()
    }
    /// Elements.
    pub fn len(&self) -> u64 {
        self.bytes() / self.dtype.size()
    }
    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.bytes() == 0
    }
    /// The elements `start..start + count` of it.
    pub fn slice(&self, start: u64, count: u64) -> Span {
        let mut pieces = Vec::new();
        self.ranges(start * self.dtype.size(), count * self.dtype.size(), &mut pieces);
        Span { dtype: self.dtype, pieces }
    }
    /// Appends the physical ranges of bytes `start..start + size`.
    pub(crate) fn ranges(&self, start: u64, size: u64, out: &mut Vec<Range>) {
        let (mut skip, mut left) = (start, size);
        for piece in &self.pieces {
            if left == 0 {
                break;
            }
            if skip >= piece.size {
                skip -= piece.size;
                continue;
            }
            let take = left.min(piece.size - skip);
            out.push(Range::new(piece.buffer, piece.offset + skip, take));
            (skip, left) = (0, left - take);
        }
    }
    /// Whether a byte of it is a byte of `other`.
    pub fn overlaps(&self, other: &Span) -> bool {
        self.pieces.iter().any(|a| other.pieces.iter().any(|b| a.overlaps(b)))
    }
    /// Whether both name the same bytes in the same order, however they are cut.
    pub(crate) fn same_bytes(&self, other: &Span) -> bool {
        self.merged() == other.merged()
    }
    fn merged(&self) -> Vec<Range> {
        let mut out: Vec<Range> = Vec::new();
        for p in self.pieces.iter().filter(|p| p.size > 0) {
            match out.last_mut() {
                Some(last) if last.buffer == p.buffer && last.end() == p.offset => last.size += p.size,
                _ => out.push(*p),
            }
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::DeviceId;

    #[test]
    fn a_slice_crosses_pieces() {
        let device = DeviceId::unique();
        let buffer = |index| BufferId { device, index, generation: 0 };
        let span = Span::new(
            DataType::F32,
            [Range::new(buffer(0), 16, 8), Range::new(buffer(1), 0, 4), Range::new(buffer(2), 4, 20)],
        );
        assert_eq!(span.len(), 8);
        assert_eq!(
            span.slice(1, 4).pieces,
            [Range::new(buffer(0), 20, 4), Range::new(buffer(1), 0, 4), Range::new(buffer(2), 4, 8)]
        );
        assert!(span.slice(8, 0).is_empty());
        assert!(span.same_bytes(&Span::new(
            DataType::F32,
            [
                Range::new(buffer(0), 16, 4),
                Range::new(buffer(0), 20, 4),
                Range::new(buffer(1), 0, 4),
                Range::new(buffer(2), 4, 20)
            ]
        )));
    }
}

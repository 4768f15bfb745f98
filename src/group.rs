//! Calls that are made as one: those that are alike become a single call over all their elements, so that many small
//! tensors cost no more than one.
use crate::{
    Error, Result,
    call::{Checked, staged},
    contract::{Device, Range},
    engine::Request,
    schedule::{Collective, Shape},
};
use std::sync::Arc;

/// The calls of a group, those that are alike as one over all their elements, in the order in which they first come.
pub(crate) fn merge(calls: Vec<(Checked, Request)>, devices: &[Arc<dyn Device>]) -> Result<Vec<(Checked, Request)>> {
    apart(&calls, devices)?;
    let mut merged: Vec<(Checked, Request)> = Vec::new();
    for (call, request) in calls {
        match merged.iter_mut().find(|(other, r)| *r == request && other.is_like(&call)) {
            Some((other, _)) => other.append(call),
            None => merged.push((call, request)),
        }
    }
    for (call, _) in &mut merged {
        call.staged = staged(call, devices);
    }
    Ok(merged)
}

impl Checked {
    /// Whether both are element for element and differ in their elements alone.
    fn is_like(&self, other: &Checked) -> bool {
        let one_by_one = matches!(
            self.shape.collective,
            Collective::AllReduce | Collective::Broadcast { .. } | Collective::Reduce { .. }
        );
        let shape = Shape { count: self.shape.count, ..other.shape.clone() };
        let alike = (self.op, self.dtype, self.wire) == (other.op, other.dtype, other.wire);
        one_by_one && alike && shape == self.shape && (&self.scales, &self.absent) == (&other.scales, &other.absent)
    }
    /// The elements of both.
    fn append(&mut self, other: Checked) {
        self.shape.count += other.shape.count;
        for (mine, theirs) in self.ranks.iter_mut().zip(other.ranks) {
            mine.input.pieces.extend(theirs.input.pieces);
            mine.output.pieces.extend(theirs.output.pieces);
            mine.after.extend(theirs.after);
        }
    }
}

/// No call writes what another reads or writes.
fn apart(calls: &[(Checked, Request)], devices: &[Arc<dyn Device>]) -> Result<()> {
    let mut accesses = Vec::new();
    for (k, (call, _)) in calls.iter().enumerate() {
        for (r, rank) in call.ranks.iter().enumerate() {
            let writes = call.shape.output_len(r as u32) > 0;
            let reads = rank.input.pieces.iter().map(|p| (*p, false));
            let all = reads.chain(rank.output.pieces.iter().map(|p| (*p, writes)));
            accesses.extend(all.filter(|(p, _)| p.size > 0).map(|(p, write)| (p, write, k, r)));
        }
    }
    accesses.sort_unstable_by_key(|(p, ..)| (p.buffer, p.offset));
    let mut open: Vec<(Range, bool, usize)> = Vec::new();
    for (piece, write, k, rank) in accesses {
        open.retain(|(p, ..)| p.buffer == piece.buffer && p.end() > piece.offset);
        if let Some((.., other)) = open.iter().find(|(_, w, other)| (*w || write) && *other != k) {
            let other = format!("the memory of call {other} of the group, and it is of call {k}");
            return Err(Error::Overlap { rank: rank as u32, device: devices[rank].info().id, other });
        }
        open.push((piece, write, k));
    }
    Ok(())
}

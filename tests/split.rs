//! Communicators over the same devices: split from one another, used at the same time, and of many sizes.
mod common;

use allhands::{
    Buffer, Collective, Communicator, DataType, Device, Error, ReduceOp, Shape, Transfer, schedule::algorithms,
};
use common::{Bench, builder, ranks, value};
use std::sync::Arc;

fn devices_of(comm: &Communicator) -> Vec<Arc<dyn Device>> {
    (0..comm.ranks()).map(|r| comm.device(r).clone()).collect()
}

/// Runs one call and checks it.
fn call(comm: &Communicator, collective: Collective, count: u64, seed: u64) {
    let devices = devices_of(comm);
    let op = collective.reduces().then_some(ReduceOp::Sum);
    let shape = Shape { collective: collective.clone(), ranks: comm.ranks(), count, in_place: false };
    let bench = Bench::new(&devices, &shape, DataType::I32, op, |r, i| value(DataType::I32, op, r, i, seed));
    comm.call(collective, op, bench.parts()).start().unwrap().wait().unwrap();
    bench.verify().unwrap_or_else(|e| panic!("{shape:?}: {e}"));
}

#[test]
fn colours_and_keys_order_the_ranks() {
    let devices = ranks(6);
    let comm = builder(&devices).build().unwrap();
    let colors = [Some(7), Some(1), None, Some(7), Some(1), Some(7)];
    let split = comm.split(&colors, &[0, 5, 0, -1, 5, 0]).unwrap();
    let found: Vec<_> = split.iter().map(|s| (s.color, s.ranks.clone())).collect();
    assert_eq!(found, [(1, vec![1, 4]), (7, vec![3, 0, 5])]);
    for part in &split {
        assert_eq!(part.communicator.ranks() as usize, part.ranks.len());
        for (new, old) in part.ranks.iter().enumerate() {
            assert_eq!(part.communicator.device(new as u32).info().id, comm.device(*old).info().id);
        }
        // The links are the parent's, under other numbers.
        let n = part.ranks.len();
        assert_eq!(part.communicator.links().len(), n * (n - 1));
        for link in part.communicator.links() {
            let (from, to) = (part.ranks[link.from as usize], part.ranks[link.to as usize]);
            let parent = comm.links().iter().find(|l| (l.from, l.to) == (from, to)).unwrap();
            assert_eq!((link.path, link.sync, link.latency), (parent.path, parent.sync, parent.latency));
            assert_eq!((link.bandwidth, &link.attempts), (parent.bandwidth, &parent.attempts));
        }
        call(&part.communicator, Collective::AllGather, 1_000, 1);
    }
    // Without keys, in the order of the ranks.
    let split = comm.split(&colors, &[]).unwrap();
    assert_eq!(split[1].ranks, [0, 3, 5]);
    assert!(comm.split(&[None; 6], &[]).unwrap().is_empty());
    for (colors, keys) in [(&colors[..5], &[][..]), (&colors, &[0; 5])] {
        assert!(matches!(comm.split(colors, keys), Err(Error::Parts { got: 5, want: 6 })));
    }
}

#[test]
fn a_part_can_be_split_again() {
    let devices = ranks(8);
    let comm = builder(&devices).build().unwrap();
    let half = |ranks: u32| -> Vec<Option<u32>> { (0..ranks).map(|r| Some(r / (ranks / 2))).collect() };
    let mut parts = comm.split(&half(8), &[]).unwrap();
    let inner = parts[1].communicator.split(&half(4), &[1, 0, 1, 0]).unwrap();
    assert_eq!(inner[1].ranks, [3, 2]);
    let last = inner[1].communicator.split(&half(2), &[]).unwrap();
    assert_eq!(last[0].communicator.device(0).info().id, devices[7].info().id);
    // One rank is a communicator too, and those that were split may go first.
    parts.clear();
    drop(comm);
    call(&last[0].communicator, Collective::AllReduce, 100, 1);
    for part in &inner {
        call(&part.communicator, Collective::AllReduce, 100, 2);
    }
}

/// A parent and two generations of parts, each from a thread of its own, over the same devices. Every call waits for
/// others of its communicator on queues that the other communicators use too.
#[test]
fn parents_and_parts_do_not_deadlock() {
    let devices = ranks(4);
    let comm = builder(&devices).build().unwrap();
    let split = |comm: &Communicator, colors: &[u32], keys: &[i32]| -> Vec<Communicator> {
        let colors: Vec<_> = colors.iter().copied().map(Some).collect();
        comm.split(&colors, keys).unwrap().into_iter().map(|s| s.communicator).collect()
    };
    let mut all = split(&comm, &[0, 0, 0, 0], &[3, 2, 1, 0]);
    all.extend(split(&comm, &[0, 1, 1, 0], &[1, 1, 0, 0]));
    all.extend(split(&all[0], &[0, 0, 0, 1], &[1, 2, 0, 0]));
    all.push(comm);
    let rounds = if common::names() == ["cpu"] { 300 } else { 30 };
    std::thread::scope(|scope| {
        for comm in &all {
            scope.spawn(move || {
                let n = comm.ranks();
                let buffers: Vec<_> =
                    (0..n).map(|r| Buffer::from_slice(comm.device(r), &[1_u32; 300]).unwrap()).collect();
                for round in 0..rounds {
                    // Queued behind each other, then waited for.
                    comm.all_reduce(&buffers, ReduceOp::Max).unwrap();
                    comm.broadcast(&buffers, round % n).unwrap();
                    comm.barrier().unwrap().wait().unwrap();
                }
                comm.all_reduce(&buffers, ReduceOp::Sum).unwrap().wait().unwrap();
                assert!(buffers.iter().all(|b| b.read::<u32>().unwrap().iter().all(|v| *v == n)));
            });
        }
    });
}

/// Every collective by every algorithm over every number of ranks.
#[test]
fn any_number_of_ranks() {
    let most = if common::names() == ["cpu"] { 17 } else { 4 };
    let devices = ranks(most);
    let whole = builder(&devices).build().unwrap();
    for n in (1..=8).chain([17]).filter(|n| *n <= most as u32) {
        let colors: Vec<_> = (0..most as u32).map(|r| (r < n).then_some(0)).collect();
        let comm = whole.split(&colors, &[]).unwrap().remove(0).communicator;
        let devices = devices_of(&comm);
        let last = n - 1;
        let ring: Arc<[Transfer]> =
            (0..n).map(|r| Transfer { from: r, to: (r + 1) % n, count: 5 + u64::from(r) }).collect();
        let collectives = [
            Collective::AllReduce,
            Collective::ReduceScatter,
            Collective::AllGather,
            Collective::Broadcast { root: last },
            Collective::Reduce { root: last / 2 },
            Collective::Gather { root: 0 },
            Collective::Scatter { root: last },
            Collective::AllToAll,
            Collective::SendRecv(ring),
            Collective::Barrier,
        ];
        for (k, collective) in (0..).zip(collectives) {
            let in_place = k % 2 == 0 && !matches!(collective, Collective::SendRecv(_) | Collective::Barrier);
            for (algorithm, count) in algorithms(&collective).iter().flat_map(|a| [(*a, 37), (*a, 1_100)]) {
                let op = collective.reduces().then_some(ReduceOp::Sum);
                let shape = Shape { collective: collective.clone(), ranks: n, count, in_place };
                let bench = Bench::new(&devices, &shape, DataType::F32, op, |r, i| value(DataType::F32, op, r, i, k));
                let call = comm.call(collective.clone(), op, bench.parts()).algorithm(Some(algorithm));
                call.start().unwrap().wait().unwrap();
                bench.verify().unwrap_or_else(|e| panic!("{shape:?} by {algorithm}: {e}"));
            }
        }
    }
}

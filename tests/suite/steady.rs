//! What a call like an earlier one costs: no command list, no device memory; and what is kept of it goes with its buffers.
use crate::common::{Bench, builder, ranks, value};
use allhands::{Buffer, Collective, DataType, Device, Part, ReduceOp, Shape};
use std::sync::Arc;

/// Devices that no other test uses, so that what they count is ours.
fn own(n: usize) -> Vec<Arc<dyn Device>> {
    ranks(n).iter().map(|device| device.sibling().unwrap()).collect()
}

const SUM: Option<ReduceOp> = Some(ReduceOp::Sum);

/// All-reduces of 20 KiB and of 2 MiB in turn.
#[test]
fn a_call_like_an_earlier_one_prepares_nothing() {
    let devices = own(2);
    let comm = builder(&devices).build().unwrap();
    let bench = |count| {
        let shape = Shape { collective: Collective::AllReduce, ranks: 2, count, in_place: false };
        Bench::new(&devices, &shape, DataType::F32, SUM, move |r, i| value(DataType::F32, SUM, r, i, count))
    };
    let benches = [bench(5 << 10), bench(512 << 10)];
    let round = || {
        for bench in &benches {
            comm.call(Collective::AllReduce, SUM, bench.parts()).start().unwrap().wait().unwrap();
        }
    };
    let counts = || devices.iter().map(|d| (d.counters().prepares, d.counters().allocated)).collect::<Vec<_>>();
    (0..4).for_each(|_| round()); // as many as short messages have banks
    let before = counts();
    (0..20).for_each(|_| round());
    let after = counts();
    benches.iter().for_each(|bench| bench.verify().unwrap());
    for ((device, before), after) in devices.iter().zip(before).zip(after) {
        assert_eq!(before.1, after.1, "bytes that {} has allocated", device.info().name);
        if devices.iter().all(|d| d.limits().resubmit) {
            assert_eq!(before.0, after.0, "lists that {} has prepared", device.info().name);
        } else {
            assert!(after.0 >= before.0 + 20, "{} uses its lists up", device.info().name);
        }
    }
}

#[test]
fn what_is_kept_of_a_call_goes_with_its_buffers() {
    let devices = own(2);
    let comm = builder(&devices).build().unwrap();
    let call = |len| {
        let buffers: Vec<Buffer> = devices.iter().map(|d| Buffer::from_slice(d, &vec![1_u32; len]).unwrap()).collect();
        for _ in 0..4 {
            comm.all_reduce(buffers.iter().map(Part::from), ReduceOp::Sum).unwrap().wait().unwrap();
        }
    };
    let allocated = || devices.iter().map(|d| d.counters().allocated).collect::<Vec<_>>();
    call(16 << 10); // staging has room for it from now on
    call(1024); // the device looks for what has completed when it is given more
    let before = allocated();
    call(16 << 10);
    call(1024);
    assert_eq!(before, allocated());
}

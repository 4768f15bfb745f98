//! Bad input: each kind is its own error, comes before anything is written, and leaves the communicator usable.
mod common;

use allhands::{
    Algorithm, Buffer, Collective, Communicator, DataType, Device, Error, Part, ReduceOp, Span, Transfer,
    contract::{self, Point, Range},
};
use allhands_cpu::{CpuDevice, Faults, Options};
use std::sync::Arc;

struct World {
    devices: Vec<Arc<dyn Device>>,
    faults: Arc<Faults>,
    comm: Communicator,
    buffers: Vec<Buffer>,
}

const COUNT: u64 = 12;

impl World {
    fn new() -> Self {
        let faults = Arc::new(Faults::default());
        let open = |faults: &Arc<Faults>| -> Arc<dyn Device> {
            CpuDevice::open(Options { faults: faults.clone(), ..Options::default() }).unwrap()
        };
        let devices = vec![open(&Arc::default()), open(&faults), open(&Arc::default())];
        let comm = common::builder(&devices).build().unwrap();
        let buffers = devices.iter().map(|d| Buffer::new(d, DataType::U32, COUNT).unwrap()).collect();
        World { devices, faults, comm, buffers }
    }
    /// `call` is refused, nothing is written, and the next call is right.
    fn refuses(&self, call: impl FnOnce(&Self) -> allhands::Result<allhands::Pending>) -> Error {
        let fill = |k: u32| {
            for (r, b) in (0..).zip(&self.buffers) {
                b.write(&(0..COUNT as u32).map(|i| k * 1000 + r * 100 + i).collect::<Vec<_>>()).unwrap();
            }
        };
        fill(1);
        let error = call(self).err().expect("it must be refused");
        for (r, b) in (0..).zip(&self.buffers) {
            let want: Vec<u32> = (0..COUNT as u32).map(|i| 1000 + r * 100 + i).collect();
            assert_eq!(b.read::<u32>().unwrap(), want, "rank {r} was written to before: {error}");
        }
        fill(2);
        self.comm.all_reduce(&self.buffers, ReduceOp::Sum).unwrap().wait().unwrap();
        for b in &self.buffers {
            let want: Vec<u32> = (0..COUNT as u32).map(|i| 3 * (2000 + i) + 300).collect();
            assert_eq!(b.read::<u32>().unwrap(), want, "the communicator is not usable after: {error}");
        }
        error
    }
    fn spans(&self) -> Vec<Span> {
        self.buffers.iter().map(Buffer::span).collect()
    }
}

macro_rules! assert_error {
    ($error:expr, $pattern:pat, $($word:expr),*) => {{
        let error = $error;
        assert!(matches!(error, $pattern), "{error:?}");
        $(assert!(error.to_string().contains($word), "{error} does not say {}", $word);)*
    }};
}

#[test]
fn wrong_lengths() {
    let w = World::new();
    let e = w.refuses(|w| {
        let mut spans = w.spans();
        spans[1] = w.buffers[1].slice(0, COUNT - 1);
        w.comm.all_reduce(spans, ReduceOp::Sum)
    });
    assert_error!(e, Error::Length { rank: 1, got: 11, .. }, "rank 1", "11", "12");
    let e = w.refuses(|w| w.comm.all_to_all(w.buffers.iter().map(|b| b.slice(0, 10))));
    assert_error!(e, Error::Length { got: 10, .. }, "multiple of 3");
}

#[test]
fn another_number_of_parts() {
    let w = World::new();
    let e = w.refuses(|w| w.comm.all_reduce(&w.buffers[..2], ReduceOp::Sum));
    assert_error!(e, Error::Parts { got: 2, want: 3 }, "2 parts", "3 local ranks");
}

#[test]
fn unequal_types() {
    let w = World::new();
    let e = w.refuses(|w| {
        let mut spans = w.spans();
        spans[2].dtype = DataType::F32;
        w.comm.all_reduce(spans, ReduceOp::Sum)
    });
    assert_error!(e, Error::Types { a: (0, DataType::U32), b: (2, DataType::F32) }, "rank 0 has u32", "rank 2 has f32");
}

#[test]
fn overlapping_output() {
    let w = World::new();
    let e = w.refuses(|w| {
        w.comm.all_reduce(w.buffers.iter().map(|b| Part::new(b.slice(0, 6), b.slice(3, 6))), ReduceOp::Sum)
    });
    assert_error!(e, Error::Overlap { rank: 0, .. }, "its own input");
    // Two ranks on one device, one output over the other's.
    let both = vec![w.devices[0].clone(), w.devices[0].clone()];
    let comm = common::builder(&both).build().unwrap();
    let b = &w.buffers[0];
    let e = w.refuses(|_| comm.all_reduce([b.slice(0, 6), b.slice(5, 6)], ReduceOp::Sum));
    assert_error!(e, Error::Overlap { rank: 0, .. }, "rank 1");
}

#[test]
fn options_that_make_no_sense() {
    let w = World::new();
    let as_f32 =
        |w: &World| -> Vec<Span> { w.buffers.iter().map(|b| Span { dtype: DataType::F32, ..b.slice(0, 4) }).collect() };
    let scaled = |spans: Vec<Span>| spans.into_iter().map(|s| Part::in_place(s).scale(0.5)).collect::<Vec<_>>();
    let absent = |spans: Vec<Span>| spans.into_iter().map(|s| Part::in_place(s).absent()).collect::<Vec<_>>();
    let e = w.refuses(|w| w.comm.all_reduce(scaled(w.spans()), ReduceOp::Sum));
    assert_error!(e, Error::Option { what: "a scale", .. }, "sum of u32");
    let e = w.refuses(|w| w.comm.all_reduce(scaled(as_f32(w)), ReduceOp::Max));
    assert_error!(e, Error::Option { what: "a scale", .. }, "max of f32");
    let e = w.refuses(|w| w.comm.broadcast(scaled(as_f32(w)), 0));
    assert_error!(e, Error::Option { what: "a scale", .. }, "broadcast");
    for algorithm in [Algorithm::Ring, Algorithm::Tree] {
        let e = w.refuses(|w| {
            let call = w.comm.call(Collective::AllReduce, Some(ReduceOp::Sum), scaled(as_f32(w)));
            call.algorithm(Some(algorithm)).start()
        });
        assert_error!(e, Error::Option { what: "a scale", .. }, algorithm.name(), "one-shot");
    }
    let e = w.refuses(|w| w.comm.broadcast(absent(w.spans()), 0));
    assert_error!(e, Error::Option { what: "an absent rank", .. }, "broadcast");
    let wired = |w: &World, spans: Vec<Span>, wire| {
        w.comm.call(Collective::AllReduce, Some(ReduceOp::Sum), spans).wire(Some(wire)).start()
    };
    let e = w.refuses(|w| wired(w, w.spans(), DataType::Bf16));
    assert_error!(e, Error::Option { what: "a wire type", .. }, "u32");
    let e = w.refuses(|w| wired(w, as_f32(w), DataType::I8));
    assert_error!(e, Error::Option { what: "a wire type", .. }, "i8", "bf16");
    let e = w.refuses(|w| {
        let call = w.comm.call(Collective::AllReduce, Some(ReduceOp::Sum), as_f32(w)).wire(Some(DataType::F16));
        call.algorithm(Some(Algorithm::Ring)).start()
    });
    assert_error!(e, Error::Option { what: "a wire type", .. }, "ring");
}

#[test]
fn groups_are_checked_before_anything_starts() {
    let w = World::new();
    let part = |w: &World, start, count| w.buffers.iter().map(|b| b.slice(start, count)).collect::<Vec<_>>();
    let e = w.refuses(|w| {
        let good = w.comm.call(Collective::AllReduce, Some(ReduceOp::Sum), part(w, 0, 4));
        let bad = w.comm.call(Collective::AllReduce, Some(ReduceOp::Sum), part(w, 4, 4).into_iter().take(2));
        w.comm.group([good, bad])
    });
    assert_error!(e, Error::Parts { got: 2, want: 3 }, "2 parts");
    let e = w.refuses(|w| {
        let good = w.comm.call(Collective::AllReduce, Some(ReduceOp::Sum), part(w, 0, 4));
        let bad = w.comm.call(Collective::AllGather, None, part(w, 4, 6)).algorithm(Some(Algorithm::Tree));
        w.comm.group([good, bad])
    });
    assert_error!(e, Error::NoAlgorithm { .. }, "all_gather");
    let e = w.refuses(|w| {
        let one = w.comm.call(Collective::AllReduce, Some(ReduceOp::Sum), part(w, 0, 4));
        let other = w.comm.call(Collective::AllReduce, Some(ReduceOp::Max), part(w, 3, 4));
        w.comm.group([one, other])
    });
    assert_error!(e, Error::Overlap { .. }, "call 0", "call 1");
}

#[test]
fn foreign_buffer() {
    let w = World::new();
    let e = w.refuses(|w| {
        let mut spans = w.spans();
        spans.swap(0, 1);
        w.comm.all_reduce(spans, ReduceOp::Sum)
    });
    assert_error!(e, Error::Foreign { rank: 0, .. }, "rank 0", "belongs to");
    let timeline = w.devices[2].create_timeline(false).unwrap();
    let e = w.refuses(|w| {
        let after = [Point { timeline, value: 0 }];
        w.comm.all_reduce(w.spans().into_iter().map(|s| Part::in_place(s).after(after)), ReduceOp::Sum)
    });
    assert_error!(e, Error::Foreign { rank: 0, what: "a point to wait for", .. }, "a point to wait for");
}

#[test]
fn dropped_buffer() {
    let w = World::new();
    let gone = Buffer::new(&w.devices[1], DataType::U32, COUNT).unwrap().span();
    // Another takes its place in the device's table: it must not be written to.
    let stranger = Buffer::from_slice(&w.devices[1], &[7_u32; COUNT as usize]).unwrap();
    let e = w.refuses(|w| {
        let mut spans = w.spans();
        spans[1] = gone.clone();
        w.comm.all_reduce(spans, ReduceOp::Sum)
    });
    assert_error!(e, Error::Dropped { rank: 1, .. }, "rank 1", "dropped");
    assert_eq!(stranger.read::<u32>().unwrap(), [7; COUNT as usize]);
}

#[test]
fn beyond_the_end_and_off_the_grid() {
    let w = World::new();
    let e = w.refuses(|w| w.comm.all_reduce(w.buffers.iter().map(|b| b.slice(1, COUNT)), ReduceOp::Sum));
    assert_error!(e, Error::Span { rank: 0, source: contract::Error::OutOfRange { .. } }, "rank 0", "48");
    let e = w.refuses(|w| {
        let odd = w.buffers.iter().map(|b| Span::new(DataType::U32, [Range::new(b.id(), 2, 8)]));
        w.comm.all_reduce(odd, ReduceOp::Sum)
    });
    assert_error!(e, Error::Misaligned { rank: 0, offset: 2, align: 4, .. }, "multiples of 4");
}

#[test]
fn no_ranks_and_ranks_elsewhere() {
    assert_error!(Communicator::builder().build().err().unwrap(), Error::NoRanks, "at least one");
    let w = World::new();
    let build = Communicator::builder().rank(w.devices[0].clone()).ranks(2).build();
    assert_error!(build.err().unwrap(), Error::NotLocal { rank: 1, ranks: 2 }, "rank 1 of 2");
}

#[test]
fn roots_algorithms_and_missing_spans() {
    let w = World::new();
    let e = w.refuses(|w| w.comm.broadcast(&w.buffers, 3));
    assert_error!(e, Error::Root { root: 3, ranks: 3 }, "rank 2");
    let messages = [Transfer { from: 0, to: 9, count: 1 }];
    let e = w.refuses(|w| w.comm.send_recv(w.spans(), &messages));
    assert_error!(e, Error::Root { root: 9, .. }, "9");
    let e = w.refuses(|w| w.comm.call(Collective::AllToAll, None, &w.buffers).algorithm(Some(Algorithm::Tree)).start());
    assert_error!(e, Error::NoAlgorithm { algorithm: Algorithm::Tree, .. }, "one-shot");
    let e = w.refuses(|w| w.comm.all_reduce(w.spans().into_iter().map(Part::input), ReduceOp::Sum));
    assert_error!(e, Error::Missing { rank: 0, what: "output", .. }, "no output");
    let e = w.refuses(|w| w.comm.call(Collective::AllReduce, None, &w.buffers).start());
    assert_error!(e, Error::Parse(_), "needs a reduction");
    let e = w.refuses(|w| {
        let apart = Buffer::new(&w.devices[0], DataType::U32, COUNT).unwrap();
        let mut parts: Vec<Part> = w.spans().into_iter().map(Part::in_place).collect();
        parts[0] = Part::new(w.buffers[0].span(), apart.span());
        w.comm.all_reduce(parts, ReduceOp::Sum)
    });
    assert_error!(e, Error::MixedInPlace { ranks: (1, 0) }, "rank 1 works in place");
}

#[test]
fn a_device_that_is_gone() {
    let w = World::new();
    // The device answers again afterwards, so that the communicator can be seen to be unharmed.
    let before: Vec<Vec<u32>> = w.buffers.iter().map(|b| b.read().unwrap()).collect();
    w.faults.lose("unplugged");
    let e = w.comm.all_reduce(&w.buffers, ReduceOp::Sum).err().unwrap();
    assert_error!(&e, Error::Device(contract::Error::Lost { .. }), "unplugged", "new communicator");
    let again = common::builder(&w.devices).build().err().unwrap();
    assert_error!(again, Error::Device(contract::Error::Lost { .. }), "unplugged");
    w.faults.revive();
    let after: Vec<Vec<u32>> = w.buffers.iter().map(|b| b.read().unwrap()).collect();
    assert_eq!(before, after, "something was written");
    w.refuses(|w| w.comm.all_reduce(&w.buffers[..1], ReduceOp::Sum));
    // Without it, a communicator over the rest is as good as any.
    w.faults.lose("unplugged again");
    let rest = [w.devices[0].clone(), w.devices[2].clone()];
    let comm = common::builder(&rest).build().unwrap();
    comm.all_reduce([&w.buffers[0], &w.buffers[2]], ReduceOp::Sum).unwrap().wait().unwrap();
}

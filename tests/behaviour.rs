//! What a caller may rely on besides right results: calls that return at once, points, deadlines, proofs that fail,
//! communicators that are dropped or share devices. On cpu ranks, whose doors make each of these happen.
mod common;

use allhands::{
    Buffer, Communicator, DataType, Device, Error, Outcome, Part, Path, ReduceOp,
    contract::{Clock, Point},
};
use allhands_cpu::{CpuDevice, Faults, Options, PathFault};
use common::builder;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

fn cpu(options: Options) -> Arc<dyn Device> {
    CpuDevice::open(options).unwrap()
}
fn faulty() -> (Arc<dyn Device>, Arc<Faults>) {
    let faults = Arc::new(Faults::default());
    (cpu(Options { faults: faults.clone(), ..Options::default() }), faults)
}
fn ones(devices: &[Arc<dyn Device>], len: usize) -> Vec<Buffer> {
    devices.iter().map(|d| Buffer::from_slice(d, &vec![1_u32; len]).unwrap()).collect()
}
fn all(buffers: &[Buffer], value: u32) -> bool {
    buffers.iter().all(|b| b.read::<u32>().unwrap().iter().all(|v| *v == value))
}

#[test]
fn a_call_returns_at_once_and_is_done_when_the_queue_moves() {
    let (stalled, faults) = faulty();
    let devices = [cpu(Options::default()), stalled];
    let comm = builder(&devices).build().unwrap();
    let buffers = ones(&devices, 1000);
    faults.stall();
    let pending = comm.all_reduce(&buffers, ReduceOp::Sum).unwrap();
    assert!(!pending.is_done().unwrap());
    let second = comm.all_reduce(&buffers, ReduceOp::Sum).unwrap();
    assert!(!pending.wait_for(Duration::from_millis(1)).unwrap());
    // Gated queues: both calls are enqueued though neither can run.
    assert!(pending.enqueued(Instant::now() + Duration::from_secs(10)).unwrap());
    assert!(second.point(0).is_some() && second.point(1).is_some());
    assert!(!pending.is_done().unwrap() && !second.is_done().unwrap());
    faults.release();
    second.wait().unwrap();
    assert!(pending.is_done().unwrap());
    assert!(all(&buffers, 4));
}

#[test]
fn held_submissions_have_no_point_until_they_are_in() {
    let (stalled, faults) = faulty();
    // A device like a wgpu-hal queue: no gates.
    let held = cpu(Options { restrict: Some(|l| l.gated = false), ..Options::default() });
    let devices = [stalled, held];
    let comm = builder(&devices).build().unwrap();
    let buffers = ones(&devices, 1000);
    faults.stall();
    let pending = comm.all_reduce(&buffers, ReduceOp::Sum).unwrap();
    assert!(pending.point(1).is_none(), "nothing may wait for what is held back");
    assert!(!pending.enqueued(Instant::now()).unwrap());
    faults.release();
    assert!(pending.enqueued(Instant::now() + Duration::from_secs(10)).unwrap());
    assert!(pending.point(1).is_some());
    assert!(pending.point(2).is_none(), "there is no rank 2");
    pending.wait().unwrap();
    assert!(all(&buffers, 2));
}

#[test]
fn what_the_data_waits_for_is_waited_for() {
    let held = cpu(Options { restrict: Some(|l| l.gated = false), ..Options::default() });
    let producer = cpu(Options::default());
    for devices in [[producer.clone(), cpu(Options::default())], [producer.clone(), held]] {
        let comm = builder(&devices).build().unwrap();
        let buffers = ones(&devices, 1000);
        let timeline = producer.create_timeline(false).unwrap();
        let ready = Point { timeline, value: 7 };
        let parts = [Part::from(&buffers[0]).after([ready]), Part::from(&buffers[1])];
        let pending = comm.all_reduce(parts, ReduceOp::Sum).unwrap();
        assert!(!pending.wait_for(Duration::from_millis(1)).unwrap());
        // The producer is still at work: its data comes only now.
        buffers[0].write(&[10_u32; 1000]).unwrap();
        producer.signal(ready).unwrap();
        pending.wait().unwrap();
        assert!(all(&buffers, 11));
    }
}

#[test]
fn a_timeline_that_goes_before_it_came_is_an_error() {
    let held = cpu(Options { restrict: Some(|l| l.gated = false), ..Options::default() });
    let devices = [held.clone(), cpu(Options::default())];
    let comm = builder(&devices).deadline(Duration::from_millis(300)).build().unwrap();
    let buffers = ones(&devices, 1000);
    let ready = Point { timeline: held.create_timeline(false).unwrap(), value: 7 };
    let parts = [Part::from(&buffers[0]).after([ready]), Part::from(&buffers[1])];
    let pending = comm.all_reduce(parts, ReduceOp::Sum).unwrap();
    assert!(!pending.wait_for(Duration::from_millis(1)).unwrap());
    held.destroy_timeline(ready.timeline);
    let error = pending.wait().unwrap_err();
    assert!(matches!(error, Error::Failed { rank: 0, .. } | Error::Timeout { .. }), "{error}");
}

#[test]
fn no_deadline_is_too_far() {
    let devices = [cpu(Options::default()), cpu(Options::default())];
    let comm = builder(&devices).deadline(Duration::MAX).build().unwrap();
    let pending = comm.all_reduce(&ones(&devices, 1000), ReduceOp::Sum).unwrap();
    assert!(pending.wait_for(Duration::MAX).unwrap());
}

#[test]
fn the_point_of_a_rank_comes_after_its_result() {
    let devices = [cpu(Options::default()), cpu(Options::default())];
    let comm = builder(&devices).build().unwrap();
    let buffers = ones(&devices, 1000);
    let pending = comm.all_reduce(&buffers, ReduceOp::Sum).unwrap();
    let after = [pending.point(0).unwrap()];
    // The app's own next submission, with no wait on the CPU.
    let copy = Buffer::new(&devices[0], DataType::U32, 1000).unwrap();
    let (src, dst) = (buffers[0].span().pieces[0], copy.span().pieces[0]);
    let commands = devices[0].prepare(&[allhands::contract::Op::Copy { src, dst }]).unwrap();
    let signal = Point { timeline: devices[0].create_timeline(false).unwrap(), value: 1 };
    let submission = allhands::contract::Submission { commands: Some(commands), waits: &after, signal };
    devices[0].submit(&[submission]).unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    // The communicator wakes the device for its own reasons: that ends a wait, and is waited out.
    while devices[0].value(signal.timeline).unwrap() < signal.value {
        assert!(Instant::now() < deadline, "the submission never came to its end");
        let _ = devices[0].wait_any(&[signal], devices[0].wakes(), deadline).unwrap();
    }
    assert!(all(&[copy], 2));
}

/// Each lie about a path is found by the proof, the next path is taken, and the link says so.
#[test]
fn a_path_that_fails_its_proof_is_not_taken() {
    let outcome = |links: &[allhands::Link], path: Path| {
        links[0].attempts.iter().rfind(|a| a.path == path).unwrap().outcome.clone()
    };
    for (fault, word) in [
        (PathFault::Zeros, "zeros"),
        (PathFault::Corrupt, "other bytes"),
        (PathFault::Stall, "no progress"),
        (PathFault::Refuse("no room in the aperture".into()), "no room in the aperture"),
    ] {
        let (liar, faults) = faulty();
        let devices = [liar, cpu(Options::default())];
        faults.set_imports(fault.clone());
        let comm = builder(&devices).build().unwrap();
        let links = comm.links();
        assert_eq!(links[0].path, Path::Copied, "{fault:?}: {links:?}");
        assert_eq!(outcome(links, Path::Copied), Outcome::Chosen);
        match outcome(links, Path::SharedHost) {
            Outcome::Failed(why) => assert!(why.contains(word), "{fault:?}: {why}"),
            other => panic!("{fault:?}: {other}"),
        }
        let buffers = ones(&devices, 1000);
        comm.all_reduce(&buffers, ReduceOp::Sum).unwrap().wait().unwrap();
        assert!(all(&buffers, 2));
        // Forced, it is an error that says why.
        let forced = builder(&devices).path(Some(Path::SharedHost)).build().err().unwrap();
        assert!(matches!(&forced, Error::Path { ranks: (0, 1), .. }), "{forced:?}");
        assert!(forced.to_string().contains(word), "{forced}");
        faults.set_imports(PathFault::None);
        let comm = builder(&devices).path(Some(Path::SharedHost)).build().unwrap();
        assert_eq!(comm.links()[0].path, Path::SharedHost);
    }
    // A path that is right but slow loses to the next.
    let (slow, faults) = faulty();
    faults.set_imports(PathFault::Delay(Duration::from_millis(20)));
    let comm = builder(&[slow, cpu(Options::default())]).build().unwrap();
    assert!(matches!(outcome(comm.links(), Path::SharedHost), Outcome::Slower(_)), "{:?}", comm.links());
    // Copies that lie leave nothing: the error lists what was tried.
    let (broken, faults) = faulty();
    faults.set_copies(PathFault::Corrupt);
    let error = builder(&[broken, cpu(Options::default())]).path(Some(Path::Copied)).build().err().unwrap();
    assert!(error.to_string().contains("other bytes"), "{error}");
}

#[test]
fn a_call_without_progress_ends_at_its_deadline_and_says_who_is_late() {
    let (clock, faults) = (Clock::manual(), Arc::new(Faults::default()));
    let on_clock =
        |faults: &Arc<Faults>| cpu(Options { clock: clock.clone(), faults: faults.clone(), ..Options::default() });
    let devices = [on_clock(&Arc::default()), on_clock(&faults)];
    let comm = builder(&devices).clock(clock.clone()).deadline(Duration::from_secs(5)).build().unwrap();
    let buffers = ones(&devices, 1000);
    // Time does not run while the data is awaited.
    let ready = Point { timeline: devices[0].create_timeline(false).unwrap(), value: 1 };
    let waiting =
        comm.all_reduce([Part::from(&buffers[0]).after([ready]), (&buffers[1]).into()], ReduceOp::Sum).unwrap();
    for _ in 0..10 {
        clock.advance(Duration::from_secs(4));
    }
    assert!(!waiting.is_done().unwrap());
    devices[0].signal(ready).unwrap();
    waiting.wait().unwrap();
    faults.stall();
    let pending = comm.all_reduce(&buffers, ReduceOp::Sum).unwrap();
    let queued = comm.barrier().unwrap();
    assert!(!pending.is_done().unwrap());
    let error = loop {
        // Rank 0 may still make progress of its own: then its time starts again.
        clock.advance(Duration::from_secs(6));
        if let Err(error) = pending.is_done() {
            break error;
        }
        std::thread::yield_now();
    };
    assert!(matches!(error, Error::Timeout { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("all_reduce #1 of 1000 elements") && text.contains("rank 1 has"), "{text}");
    assert!(queued.wait().is_err());
    let later = comm.all_reduce(&buffers, ReduceOp::Sum).err().unwrap();
    assert!(matches!(&later, Error::Poisoned { .. }) && later.to_string().contains("no progress"), "{later}");
    // The queues run dry, and another communicator works over the same devices.
    faults.release();
    let comm = builder(&devices).clock(clock).build().unwrap();
    let fresh = ones(&devices, 1000);
    comm.all_reduce(&fresh, ReduceOp::Sum).unwrap().wait().unwrap();
    assert!(all(&fresh, 2));
}

#[test]
fn a_device_lost_in_flight_ends_every_call_with_the_cause() {
    let (lost, faults) = faulty();
    let devices = [cpu(Options::default()), lost, cpu(Options::default())];
    let comm = builder(&devices).build().unwrap();
    let buffers = ones(&devices, 1000);
    faults.stall();
    let pending = comm.all_reduce(&buffers, ReduceOp::Sum).unwrap();
    faults.lose("it fell off the bus");
    let error = pending.wait().err().unwrap();
    assert!(error.to_string().contains("it fell off the bus"), "{error}");
    assert!(comm.barrier().is_err());
    let rest = [devices[0].clone(), devices[2].clone()];
    let comm = builder(&rest).build().unwrap();
    let fresh = ones(&rest, 1000);
    comm.all_reduce(&fresh, ReduceOp::Sum).unwrap().wait().unwrap();
    assert!(all(&fresh, 2));
}

#[test]
fn a_communicator_dropped_with_work_in_flight_finishes_it_or_says_so() {
    let (stalled, faults) = faulty();
    let devices = [cpu(Options::default()), stalled];
    let buffers = ones(&devices, 1000);
    faults.stall();
    let start = |deadline| {
        faults.release();
        let comm = builder(&devices).deadline(deadline).build().unwrap();
        faults.stall();
        comm.all_reduce(&buffers, ReduceOp::Sum).unwrap()
        // ... and the communicator is dropped.
    };
    let pending = start(Duration::from_secs(60));
    assert!(!pending.is_done().unwrap());
    faults.release();
    pending.wait().unwrap();
    assert!(all(&buffers, 2));
    let pending = start(Duration::from_millis(50));
    assert!(matches!(pending.wait(), Err(Error::Timeout { .. })));
    faults.release();
}

#[test]
fn two_ranks_on_one_queue_do_not_wait_for_each_other() {
    let device = cpu(Options::default());
    for ranks in [2, 3, 5] {
        let devices = vec![device.clone(); ranks];
        let comm = builder(&devices).build().unwrap();
        let buffers = ones(&devices, 1000);
        for _ in 0..3 {
            comm.all_reduce(&buffers, ReduceOp::Max).unwrap();
        }
        comm.all_reduce(&buffers, ReduceOp::Sum).unwrap().wait().unwrap();
        assert!(all(&buffers, ranks as u32));
    }
}

/// Two communicators over the same devices in opposite order, from two threads: neither can queue first on one device
/// and second on the other.
#[test]
fn two_communicators_over_the_same_devices_never_cross() {
    const CALLS: u32 = 10_000;
    let devices = [cpu(Options::default()), cpu(Options::default())];
    let reversed = [devices[1].clone(), devices[0].clone()];
    let run = |devices: &[Arc<dyn Device>]| {
        let comm: Communicator = builder(devices).build().unwrap();
        let buffers = ones(devices, 50);
        for k in 0..CALLS {
            let pending = comm.all_reduce(&buffers, if k % 2 == 0 { ReduceOp::Sum } else { ReduceOp::Max }).unwrap();
            if k % 16 == 15 {
                pending.wait().unwrap();
                assert!(all(&buffers, 256), "call {k}");
                buffers.iter().for_each(|b| b.write(&[1_u32; 50]).unwrap());
            }
        }
    };
    std::thread::scope(|s| {
        s.spawn(|| run(&devices));
        s.spawn(|| run(&reversed));
    });
}

/// Long, short and long again: what staging holds returns to what short calls need.
#[test]
fn staging_of_long_messages_is_given_back() {
    let devices = [cpu(Options::default()), cpu(Options::default())];
    let comm = builder(&devices).path(Some(Path::Copied)).build().unwrap();
    let (short, long) = (ones(&devices, 1000), ones(&devices, 1 << 20));
    let call = |b: &[Buffer]| comm.all_reduce(b, ReduceOp::Max).unwrap().wait().unwrap();
    call(&short);
    let least = comm.staging_bytes();
    call(&long);
    let most = comm.staging_bytes();
    assert!(most > 2 * least);
    // Alternating sizes keep it.
    for _ in 0..100 {
        call(&short);
        call(&long);
    }
    assert_eq!(comm.staging_bytes(), most);
    for _ in 0..64 {
        call(&short);
    }
    assert_eq!(comm.staging_bytes(), least);
    let allocated: u64 = devices.iter().map(|d| d.counters().allocated).sum();
    let buffers = 2 * (4 * 1000 + (4 << 20));
    assert!(allocated <= least + buffers + (64 << 10), "{allocated} bytes are still allocated");
}

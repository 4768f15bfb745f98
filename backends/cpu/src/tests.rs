//! What the conformance suite cannot ask of every device: emulation, faults, restriction, and dropping.
use crate::*;
use allhands_contract::*;
use std::{
    sync::{Arc, Barrier, mpsc},
    time::{Duration, Instant},
};

const BYTES: u64 = 4096;

/// A device with a timeline, and what tests do over and over.
struct Rig {
    device: Arc<CpuDevice>,
    timeline: TimelineId,
}

impl Rig {
    fn new(options: Options) -> Self {
        let device = CpuDevice::open(options).unwrap();
        let timeline = device.create_timeline(false).unwrap();
        Rig { device, timeline }
    }
    fn of(mode: Mode) -> Self {
        Rig::new(Options { mode, ..Options::default() })
    }
    fn faults(&self) -> &Faults {
        &self.device.options().faults
    }
    fn buffer(&self, memory: Memory) -> BufferId {
        self.device.create_buffer(&BufferDesc { size: BYTES, memory, exportable: true }).unwrap()
    }
    fn imported(&self, from: &Rig, content: u8) -> Result<BufferId> {
        let buffer = from.buffer(Memory::Mapped);
        from.device.write(all(buffer), &[content; BYTES as usize]).unwrap();
        self.device.import(&from.device.export(buffer, SharedKind::Host)?)
    }
    fn copy(&self, from: BufferId, to: BufferId) -> CommandsId {
        self.device.prepare(&[Op::Copy { src: all(from), dst: all(to) }]).unwrap()
    }
    fn submit(&self, commands: impl Into<Option<CommandsId>>, waits: &[Point], value: u64) -> Result<()> {
        self.device.submit(&[Submission { commands: commands.into(), waits, signal: self.point(value) }])
    }
    fn point(&self, value: u64) -> Point {
        Point { timeline: self.timeline, value }
    }
    /// Waits for a value; a minute is as good as for ever.
    fn wait(&self, value: u64) -> Result<Waited> {
        let deadline = self.device.clock().now() + Duration::from_secs(60);
        self.device.wait_any(&[self.point(value)], self.device.wakes(), deadline)
    }
    fn reach(&self, value: u64) {
        assert_eq!(self.wait(value), Ok(Waited::Reached));
    }
    fn content(&self, buffer: BufferId) -> Vec<u8> {
        let mut bytes = vec![0xee; BYTES as usize];
        self.device.read(all(buffer), &mut bytes).unwrap();
        bytes
    }
}

fn all(buffer: BufferId) -> Range {
    Range::new(buffer, 0, BYTES)
}

fn flipped(content: u8) -> Vec<u8> {
    let mut bytes = vec![content; BYTES as usize];
    bytes[BYTES as usize / 2] ^= 1;
    bytes
}

#[test]
fn emulated_time_passes_on_the_clock() {
    let emulation = Emulation {
        submit_latency: Duration::from_micros(7),
        link_bandwidth: Some(4_096_000_000),            // a buffer in a microsecond
        visibility_per_mib: Duration::from_micros(256), // a buffer in a microsecond
    };
    for mode in [Mode::Inline, Mode::Threaded] {
        let clock = Clock::manual();
        let rig = Rig::new(Options { mode, clock: clock.clone(), emulation, ..Options::default() });
        let source = Rig::of(Mode::Threaded);
        let start = clock.now();
        let passed = || (clock.now() - start).as_micros();
        rig.submit(None, &[], 1).unwrap();
        rig.reach(1);
        assert_eq!(passed(), 7);
        let (a, b) = (rig.buffer(Memory::Device), rig.buffer(Memory::Device));
        let local = rig.copy(a, b);
        rig.submit(local, &[], 2).unwrap();
        rig.reach(2);
        assert_eq!(passed(), 14, "a local copy crosses no link");
        let imports = [(); 3].map(|()| rig.imported(&source, 1).unwrap());
        rig.submit(local, &[], 3).unwrap();
        rig.reach(3);
        assert_eq!(passed(), 14 + 7 + 3, "each signal pays for what is imported");
        let (once, twice) = (rig.copy(imports[0], a), rig.copy(imports[0], imports[1]));
        rig.submit(once, &[], 4).unwrap();
        rig.submit(twice, &[], 5).unwrap();
        rig.reach(5);
        assert_eq!(passed(), 24 + (7 + 1 + 3) + (7 + 2 + 3));
        rig.device.destroy_buffer(imports[2]);
        rig.submit(local, &[], 6).unwrap();
        rig.reach(6);
        assert_eq!(passed(), 47 + 7 + 2, "what is gone is not resident");
        rig.device.destroy_buffer(imports[1]);
        rig.submit(local, &[], 7).unwrap();
        rig.reach(7);
        assert_eq!(passed(), 56 + 7 + 2, "commands keep an import resident");
    }
}

#[test]
fn real_time_passes_too() {
    let emulation = Emulation { submit_latency: Duration::from_millis(2), ..Emulation::default() };
    let rig = Rig::new(Options { emulation, ..Options::default() });
    let start = Instant::now();
    rig.submit(None, &[], 1).unwrap();
    rig.reach(1);
    assert!(start.elapsed() >= emulation.submit_latency);
}

#[test]
fn deadlines_come_on_a_virtual_clock() {
    let clock = Clock::manual();
    let rig = Rig::new(Options { clock: clock.clone(), ..Options::default() });
    let deadline = clock.now() + Duration::from_secs(1000);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| rig.device.wait_any(&[rig.point(1)], rig.device.wakes(), deadline));
        clock.advance(Duration::from_secs(999));
        assert!(!waiter.is_finished());
        clock.advance(Duration::from_secs(1));
        assert_eq!(waiter.join().unwrap(), Ok(Waited::TimedOut));
    });
}

#[test]
fn imports_lie_on_demand() {
    let source = Rig::of(Mode::Threaded);
    for mode in [Mode::Inline, Mode::Threaded] {
        let rig = Rig::of(mode);
        let to = rig.buffer(Memory::Device);
        let mut value = 0;
        let mut fetch = |import| {
            value += 1;
            rig.submit(rig.copy(import, to), &[], value).unwrap();
            rig.reach(value);
            rig.content(to)
        };
        let honest = rig.imported(&source, 0x5a).unwrap();
        assert_eq!(fetch(honest), [0x5a; BYTES as usize]);
        rig.faults().set_imports(PathFault::Corrupt);
        assert_eq!(fetch(honest), flipped(0x5a));
        rig.faults().set_imports(PathFault::Zeros);
        let liar = rig.imported(&source, 0x5a).unwrap();
        assert_eq!(fetch(liar), [0; BYTES as usize]);
        assert_eq!(fetch(honest), [0x5a; BYTES as usize], "made before the lie");
        rig.faults().refuse_imports("no such pages");
        let refused = rig.imported(&source, 1).unwrap_err();
        assert!(matches!(&refused, Error::Invalid { what, .. } if what == "no such pages"), "{refused}");
        rig.faults().set_imports(PathFault::None);
        let import = rig.imported(&source, 0x77).unwrap();
        assert_eq!(fetch(import), [0x77; BYTES as usize]);
    }
}

#[test]
fn kernels_over_a_corrupt_import_are_wrong() {
    let (rig, source) = (Rig::of(Mode::Threaded), Rig::of(Mode::Threaded));
    let (import, to) = (rig.imported(&source, 2).unwrap(), rig.buffer(Memory::Device));
    rig.faults().set_imports(PathFault::Corrupt);
    let kernel = Kernel {
        stores: vec![all(to)],
        sources: vec![all(import), all(import)],
        op: ReduceOp::Sum,
        dtype: DataType::U8,
        finish: None,
        scales: Vec::new(),
        wire: None,
    };
    let commands = rig.device.prepare(&[Op::Kernel(kernel)]).unwrap();
    rig.submit(commands, &[], 1).unwrap();
    rig.reach(1);
    assert_eq!(rig.content(to), flipped(4));
}

#[test]
fn carrying_fails_on_demand() {
    for (mode, memory) in [(Mode::Inline, Memory::Device), (Mode::Threaded, Memory::Upload)] {
        let rig = Rig::of(mode);
        let (from, to) = (rig.buffer(memory), rig.buffer(Memory::Download));
        let commands = rig.copy(from, to);
        rig.device.write(all(from), &[9; BYTES as usize]).unwrap();
        let cases = [
            (PathFault::Corrupt, flipped(9)),
            (PathFault::Zeros, vec![0; BYTES as usize]),
            (PathFault::None, vec![9; BYTES as usize]),
        ];
        for (value, (fault, want)) in (1..).zip(cases) {
            rig.faults().set_copies(fault);
            rig.submit(commands, &[], value).unwrap();
            rig.reach(value);
            assert_eq!(rig.content(to), want);
        }
        rig.faults().set_copies(PathFault::Refuse("no carrier".into()));
        assert!(rig.device.prepare(&[Op::Copy { src: all(from), dst: all(to) }]).is_err());
    }
}

#[test]
fn a_copy_between_its_own_device_memory_carries_nothing() {
    let rig = Rig::of(Mode::Threaded);
    let (from, to) = (rig.buffer(Memory::Device), rig.buffer(Memory::Device));
    rig.device.write(all(from), &[9; BYTES as usize]).unwrap();
    rig.faults().set_copies(PathFault::Corrupt);
    rig.faults().set_imports(PathFault::Corrupt);
    rig.submit(rig.copy(from, to), &[], 1).unwrap();
    rig.reach(1);
    assert_eq!(rig.content(to), [9; BYTES as usize]);
}

#[test]
fn a_stalled_path_stands_until_the_fault_is_gone() {
    let source = Rig::of(Mode::Threaded);
    for mode in [Mode::Inline, Mode::Threaded] {
        let rig = Rig::of(mode);
        let (import, to) = (rig.imported(&source, 3).unwrap(), rig.buffer(Memory::Device));
        let commands = rig.copy(import, to);
        rig.faults().set_imports(PathFault::Stall);
        std::thread::scope(|scope| {
            let (sender, done) = mpsc::channel();
            let rig = &rig;
            scope.spawn(move || {
                rig.submit(commands, &[], 1).unwrap();
                rig.reach(1);
                sender.send(()).unwrap();
            });
            assert_eq!(done.try_recv(), Err(mpsc::TryRecvError::Empty));
            assert_eq!(rig.device.value(rig.timeline), Ok(0));
            rig.faults().set_imports(PathFault::None);
            done.recv().unwrap();
        });
        assert_eq!(rig.content(to), [3; BYTES as usize]);
    }
}

#[test]
fn a_delayed_path_takes_the_clocks_time() {
    let clock = Clock::manual();
    let rig = Rig::new(Options { clock: clock.clone(), ..Options::default() });
    let import = rig.imported(&Rig::of(Mode::Inline), 3).unwrap();
    let start = clock.now();
    rig.faults().set_imports(PathFault::Delay(Duration::from_secs(30)));
    rig.submit(rig.copy(import, rig.buffer(Memory::Device)), &[], 1).unwrap();
    rig.reach(1);
    assert_eq!(clock.now() - start, Duration::from_secs(30));
}

#[test]
fn a_stalled_queue_goes_on_when_released() {
    let rig = Rig::of(Mode::Threaded);
    let sibling = rig.device.sibling().unwrap();
    let far = sibling.create_timeline(false).unwrap();
    let reached = Point { timeline: far, value: 1 };
    rig.faults().stall();
    rig.submit(None, &[], 1).unwrap();
    rig.submit(None, &[], 2).unwrap();
    sibling.submit(&[Submission { commands: None, waits: &[], signal: reached }]).unwrap();
    let now = sibling.clock().now();
    assert_eq!(rig.device.wait_any(&[rig.point(1)], 0, now), Ok(Waited::TimedOut));
    assert_eq!(sibling.wait_any(&[reached], 0, now), Ok(Waited::TimedOut), "siblings share faults");
    rig.faults().release();
    rig.reach(2);
    assert_eq!(sibling.wait_any(&[reached], 0, now + Duration::from_secs(60)), Ok(Waited::Reached));
}

#[test]
fn a_lost_device_says_so_everywhere_and_forgets_its_queue() {
    let rig = Rig::of(Mode::Threaded);
    let d = &rig.device;
    let (from, to) = (rig.buffer(Memory::Upload), rig.buffer(Memory::Device));
    d.write(all(from), &[1; BYTES as usize]).unwrap();
    let commands = rig.copy(from, to);
    let exported = d.export(to, SharedKind::Host).unwrap();
    rig.submit(commands, &[rig.point(1)], 2).unwrap();
    let why = Err(Error::Lost { device: d.info().id, why: "pulled out".into() });
    let about_to_wait = Barrier::new(2);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            about_to_wait.wait();
            rig.wait(2)
        });
        about_to_wait.wait();
        (0..100).for_each(|_| std::thread::yield_now()); // most likely, it waits by now; either way it must end
        rig.faults().lose("pulled out");
        assert_eq!(waiter.join().unwrap().map(|_| ()), why);
    });
    let desc = BufferDesc { size: 1, memory: Memory::Device, exportable: false };
    let calls = [
        d.status(),
        d.sibling().map(drop),
        d.create_buffer(&desc).map(drop),
        d.size(to).map(drop),
        d.read(all(to), &mut [0; BYTES as usize]),
        d.write(all(to), &[0; BYTES as usize]),
        d.export(to, SharedKind::Host).map(drop),
        d.import(&exported).map(drop),
        d.create_timeline(false).map(drop),
        d.value(rig.timeline).map(drop),
        d.signal(rig.point(1)),
        rig.wait(1).map(|_| ()),
        d.prepare(&[]).map(drop),
        rig.submit(commands, &[], 3),
    ];
    for (i, result) in calls.into_iter().enumerate() {
        assert_eq!(result, why, "call {i}");
    }
    rig.faults().revive();
    d.signal(rig.point(1)).unwrap();
    rig.submit(None, &[], 3).unwrap();
    rig.reach(3);
    assert_eq!(rig.content(to), [0; BYTES as usize], "what was queued has not run");
}

#[test]
fn an_inline_submit_ends_when_its_device_is_lost() {
    let rig = Rig::of(Mode::Inline);
    rig.faults().stall();
    std::thread::scope(|scope| {
        let submit = scope.spawn(|| rig.submit(None, &[], 1));
        rig.faults().lose("pulled out");
        assert!(matches!(submit.join().unwrap(), Err(Error::Lost { .. })));
    });
}

#[test]
fn what_is_destroyed_in_flight_lives_until_it_has_run() {
    let rig = Rig::of(Mode::Threaded);
    let d = &rig.device;
    let kept = rig.buffer(Memory::Device);
    let (from, gate) = (rig.buffer(Memory::Upload), d.create_timeline(false).unwrap());
    d.write(all(from), &[6; BYTES as usize]).unwrap();
    let commands = rig.copy(from, kept);
    let (open, held) = (Point { timeline: gate, value: 1 }, d.create_timeline(false).unwrap());
    rig.submit(commands, &[open], 1).unwrap();
    d.submit(&[Submission { commands: None, waits: &[], signal: Point { timeline: held, value: 1 } }]).unwrap();
    d.destroy_commands(commands);
    d.destroy_buffer(from);
    d.destroy_timeline(held);
    assert_eq!(d.counters().allocated, 2 * BYTES);
    assert!(matches!(rig.submit(commands, &[], 2), Err(Error::Stale { .. })));
    d.signal(open).unwrap();
    rig.reach(1);
    assert_eq!(d.counters().allocated, BYTES, "gone before its last use is signalled");
    assert_eq!(rig.content(kept), [6; BYTES as usize]);
}

#[test]
fn exported_pages_outlive_their_device() {
    let rig = Rig::of(Mode::Threaded);
    let import = {
        let gone = Rig::of(Mode::Threaded);
        rig.imported(&gone, 8).unwrap()
    };
    assert_eq!(rig.content(import), [8; BYTES as usize]);
}

#[test]
fn a_device_lost_in_the_middle_of_a_submission_does_not_signal_it() {
    /// Loses a device as soon as its clock moves.
    struct Loser(Arc<Faults>);
    impl Wake for Loser {
        fn wake(&self) {
            self.0.lose("in the middle");
        }
    }
    let emulation = Emulation { submit_latency: Duration::from_secs(1), ..Emulation::default() };
    let rig = Rig::new(Options { mode: Mode::Inline, clock: Clock::manual(), emulation, ..Options::default() });
    let loser: Arc<dyn Wake> = Arc::new(Loser(rig.device.options().faults.clone()));
    rig.device.clock().observe(Arc::downgrade(&loser));
    assert!(matches!(rig.submit(None, &[], 1), Err(Error::Lost { .. })));
    rig.faults().revive();
    assert_eq!(rig.device.value(rig.timeline), Ok(0));
}

#[test]
fn dropping_a_device_ends_its_thread_whatever_is_queued() {
    let stuck: [fn(&Rig, CommandsId); 3] = [
        |rig, _| rig.submit(None, &[rig.point(1)], 2).unwrap(),
        |rig, _| {
            rig.faults().stall();
            rig.submit(None, &[], 1).unwrap();
        },
        |rig, carries| {
            rig.faults().set_copies(PathFault::Stall);
            rig.submit(carries, &[], 1).unwrap();
        },
    ];
    for (case, stick) in stuck.into_iter().enumerate() {
        let (rig, kept) = (Rig::of(Mode::Threaded), Rig::of(Mode::Inline));
        let (shared, local) = (rig.buffer(Memory::Mapped), rig.buffer(Memory::Device));
        let import = kept.device.import(&rig.device.export(shared, SharedKind::Host).unwrap()).unwrap();
        rig.device.write(all(local), &[1; BYTES as usize]).unwrap();
        stick(&rig, rig.copy(shared, rig.buffer(Memory::Device)));
        rig.submit(rig.copy(local, shared), &[], 3).unwrap();
        let faults = rig.device.options().faults.clone();
        drop(rig); // joins its thread
        assert_eq!(Arc::strong_count(&faults), 1, "case {case}: nothing of the device is left");
        assert_eq!(kept.content(import), [0; BYTES as usize], "case {case}: what follows has not run");
    }
}

#[test]
fn dropping_a_device_runs_what_can_run() {
    let (rig, kept) = (Rig::of(Mode::Threaded), Rig::of(Mode::Inline));
    let from = rig.buffer(Memory::Device);
    rig.device.write(all(from), &[4; BYTES as usize]).unwrap();
    let target = kept.buffer(Memory::Mapped);
    let to = rig.device.import(&kept.device.export(target, SharedKind::Host).unwrap()).unwrap();
    rig.submit(rig.copy(from, to), &[], 1).unwrap();
    drop(rig);
    assert_eq!(kept.content(target), [4; BYTES as usize]);
}

#[test]
fn a_restricted_device_refuses_what_it_lacks() {
    let restrict = |limits: &mut Limits| {
        limits.gated = false;
        limits.resubmit = false;
        limits.memory_import.clear();
        limits.kernels.retain(|(op, _)| *op == ReduceOp::Sum);
    };
    let rig = Rig::new(Options { restrict: Some(restrict), ..Options::default() });
    let (a, b) = (rig.buffer(Memory::Device), rig.buffer(Memory::Device));
    assert!(matches!(rig.imported(&Rig::of(Mode::Inline), 1), Err(Error::Unsupported { .. })));
    assert!(matches!(rig.device.signal(rig.point(1)), Err(Error::Unsupported { .. })));
    assert!(matches!(rig.submit(None, &[rig.point(1)], 2), Err(Error::Invalid { .. })));
    let commands = rig.copy(a, b);
    let twice = [1, 2].map(|value| Submission { commands: Some(commands), waits: &[], signal: rig.point(value) });
    assert!(matches!(rig.device.submit(&twice), Err(Error::Stale { .. })));
    rig.submit(commands, &[], 1).unwrap();
    assert!(matches!(rig.submit(commands, &[], 2), Err(Error::Stale { .. })));
    rig.reach(1);
}

#[test]
fn signals_of_one_submit_rise_or_none_is_made() {
    let rig = Rig::of(Mode::Threaded);
    let falling = [2, 1].map(|value| Submission { commands: None, waits: &[], signal: rig.point(value) });
    assert!(matches!(rig.device.submit(&falling), Err(Error::Invalid { .. })));
    rig.submit(None, &[], 1).unwrap();
    rig.reach(1);
}

#[test]
fn kernels_bind_no_transfer_memory_and_finish_over_somebody() {
    let rig = Rig::of(Mode::Threaded);
    let kernel = |memory, finish| {
        let (to, from) = (all(rig.buffer(Memory::Device)), all(rig.buffer(memory)));
        let (op, dtype) = (ReduceOp::Average, DataType::I32);
        rig.device.prepare(&[Op::Kernel(Kernel {
            stores: vec![to],
            sources: vec![from],
            op,
            dtype,
            finish,
            scales: Vec::new(),
            wire: None,
        })])
    };
    assert!(kernel(Memory::Mapped, Some(1)).is_ok());
    for (memory, finish) in [(Memory::Upload, None), (Memory::Download, None), (Memory::Device, Some(0))] {
        assert!(matches!(kernel(memory, finish), Err(Error::Invalid { .. })), "{memory:?}");
    }
}

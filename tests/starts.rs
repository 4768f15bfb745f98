//! Communicators that start on drivers with a fault, over every door: each comes up by the next path and says why, its
//! results are right, and nothing is left behind. On the native Vulkan devices of the cell (`ALLHANDS_DEVICES`).
mod common;

use allhands::{Algorithm, Buffer, Collective, Communicator, Device, Error, Link, Outcome, Path, ReduceOp};
use allhands_vulkan::{Door, Doors, Fault, VulkanDevice, ash::vk};
use common::{builder, hash};
use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// All, and in a slice.
const STARTS: (u64, u64) = (1_000, 70);
/// After so many a process has what memory it needs.
const WARM: u64 = 50;
/// A start in so many meets a call that does not return: a proof gives it up after some seconds.
const STALLS: u64 = 64;

/// Two ranks, each on the next of the cell's devices, that have their doors.
fn devices() -> Option<[Arc<VulkanDevice>; 2]> {
    let names = common::names();
    let selectors: Vec<&str> = names.iter().filter_map(|n| n.strip_prefix("vulkan:")).collect();
    if selectors.is_empty() {
        println!("not applicable: the cell has no native Vulkan device");
        return None;
    }
    let open = |rank: usize| {
        let selector = selectors[rank % selectors.len()].parse().unwrap();
        VulkanDevice::open_with(&selector, Arc::new(Doors::default())).unwrap_or_else(|e| panic!("{e}"))
    };
    Some([open(0), open(1)])
}

/// A fault, and what becomes of a start with it.
#[derive(Clone, Copy, Debug)]
struct Case {
    door: Door,
    fault: Fault,
    /// Of the ranks whose device has it, a bit each.
    ranks: u8,
    /// Calls that go right before the one that does not; `None`: none ever goes right.
    skip: Option<u32>,
}

/// Doors that a start survives though they stay shut: some path does without.
const FOR_GOOD: [Door; 2] = [Door::Export, Door::Import];
/// Doors that every start goes through.
const USED: [Door; 6] =
    [Door::BufferCreate, Door::Export, Door::Import, Door::TimelineCreate, Door::Submit, Door::Wait];
/// Doors that are passed only where a driver shares timelines.
const SHARED: [Door; 2] = [Door::TimelineExport, Door::TimelineImport];

impl Case {
    fn draw(seed: u64, shares_timelines: bool) -> Case {
        let draw = |salt: u64, n: usize| hash(seed << 8 | salt) as usize % n;
        let doors: Vec<Door> = if shares_timelines { USED.into_iter().chain(SHARED).collect() } else { USED.into() };
        let why = [
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY,
            vk::Result::ERROR_INVALID_EXTERNAL_HANDLE,
            vk::Result::ERROR_UNKNOWN,
        ];
        let fail = Fault::Fail(why[draw(0, why.len())]);
        let ranks = 1 + draw(1, 3) as u8;
        let one = 1 << draw(1, 2);
        match draw(2, 3) {
            // Early in the proof of the first path: behind the proofs there is nobody to give it up.
            _ if seed % STALLS == 7 => {
                Case { door: doors[draw(3, doors.len())], fault: Fault::Stall, ranks: one, skip: Some(0) }
            }
            0 => Case { door: Door::Import, fault: Fault::Lie, ranks, skip: None },
            1 => Case { door: FOR_GOOD[draw(3, 2)], fault: fail, ranks, skip: None },
            // Anywhere: in the first path's proof, in a later one's, or on the devices in use.
            _ => Case { door: doors[draw(3, doors.len())], fault: fail, ranks: one, skip: Some(draw(4, 40) as u32) },
        }
    }
    fn shut(&self, devices: &[Arc<VulkanDevice>; 2]) {
        for (_, device) in devices.iter().enumerate().filter(|(rank, _)| self.ranks >> rank & 1 == 1) {
            match self.skip {
                None => device.doors().shut(self.door, self.fault),
                Some(skip) => device.doors().shut_once(self.door, self.fault, skip),
            }
        }
    }
}

fn hits(devices: &[Arc<VulkanDevice>; 2]) -> u64 {
    devices.iter().map(|d| d.doors().hits()).sum()
}

fn ranks(devices: &[Arc<VulkanDevice>; 2]) -> Vec<Arc<dyn Device>> {
    devices.iter().map(|d| d.clone() as Arc<dyn Device>).collect()
}

/// One all-reduce of some floats.
fn works(comm: &Communicator, devices: &[Arc<VulkanDevice>; 2], seed: u64) {
    let value = |rank: u64, i: u64| f32::from(hash(seed << 40 ^ rank << 32 ^ i) as u8);
    let data = |rank: u64| (0..1_001).map(|i| value(rank, i)).collect::<Vec<f32>>();
    let buffers: Vec<Buffer> =
        (0..).zip(ranks(devices)).map(|(rank, d)| Buffer::from_slice(&d, &data(rank)).unwrap()).collect();
    let call = comm.call(Collective::AllReduce, Some(ReduceOp::Sum), &buffers);
    call.algorithm(Some(Algorithm::OneShot)).start().unwrap().wait().unwrap();
    let want: Vec<f32> = (0..1_001).map(|i| value(0, i) + value(1, i)).collect();
    for (rank, buffer) in buffers.iter().enumerate() {
        assert!(buffer.read::<f32>().unwrap() == want, "rank {rank} of start {seed}");
    }
}

/// What a process holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Held {
    descriptors: usize,
    threads: usize,
    allocated: u64,
}

impl Held {
    fn now(devices: &[Arc<VulkanDevice>; 2]) -> Held {
        let count = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).unwrap().count();
        let allocated = devices.iter().map(|d| d.counters().allocated).sum();
        Held { descriptors: count("fd"), threads: count("task"), allocated }
    }
    /// Once what was left behind at a stalled door has gone its way.
    fn settles_at(self, devices: &[Arc<VulkanDevice>; 2]) {
        let far = Instant::now() + Duration::from_secs(60);
        while Held::now(devices) != self && Instant::now() < far {
            thread::yield_now();
        }
        assert_eq!(Held::now(devices), self, "what a process holds stays what it was");
    }
}

/// Of the process: bytes of its heaps that are in use, the driver's too, and resident bytes.
fn memory() -> (u64, u64) {
    malloc_trim(0); // Else it keeps what was freed, now more and now less.
    let heap = mallinfo2();
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
    ((heap.in_use + heap.mapped) as u64, pages * 4096)
}

#[repr(C)]
struct Heap {
    _counts: [usize; 4],
    mapped: usize,
    _limits: [usize; 2],
    in_use: usize,
    _free: [usize; 2],
}
unsafe extern "C" {
    safe fn mallopt(parameter: std::ffi::c_int, value: std::ffi::c_int) -> std::ffi::c_int;
    safe fn mallinfo2() -> Heap;
    safe fn malloc_trim(keep: usize) -> std::ffi::c_int;
}
/// One heap for all threads: each of many would keep what was freed.
const ARENA_MAX: std::ffi::c_int = -8;

/// One test, because what is counted is the process's.
#[test]
fn starts_with_faults() {
    assert_eq!(mallopt(ARENA_MAX, 1), 1);
    let Some(devices) = devices() else { return };
    (0..2).for_each(|shut| peer_access_is_found_where_it_goes_one_way(&devices, shut));
    a_start_takes_the_next_path(&devices);
    a_start_that_cannot_be_says_why(&devices);
}

fn a_start_takes_the_next_path(devices: &[Arc<VulkanDevice>; 2]) {
    // What is made on first use is made: kernels for each path too.
    for path in Path::ALL {
        works(&builder(&ranks(devices)).path(Some(path)).build().unwrap(), devices, 0);
    }
    let comm = builder(&ranks(devices)).build().unwrap();
    works(&comm, devices, 0);
    let (usual, attempts) = (comm.links()[0].path, &comm.links()[0].attempts);
    let proven: Vec<Path> = attempts.iter().filter(|a| is_proven(&a.outcome)).map(|a| a.path).collect();
    let reach: Vec<_> = (0..comm.ranks()).map(|rank| comm.host_reaches(rank).err().map(String::from)).collect();
    drop(comm);
    let limits = devices[0].limits();
    let shares_timelines = limits.timeline_export && limits.timeline_import;
    let held = Held::now(devices);
    let starts = if common::quick() { STARTS.1 } else { STARTS.0 };
    let (mut met, mut lower, mut base) = (0, 0, (0, 0));
    for seed in 0..starts {
        let case = Case::draw(seed, shares_timelines);
        let before = hits(devices);
        case.shut(devices);
        let built = builder(&ranks(devices)).build();
        devices.iter().for_each(|d| d.doors().open(case.door));
        let was_met = hits(devices) > before;
        let comm = built.unwrap_or_else(|e| panic!("start {seed}, {case:?}: {e}"));
        for link in comm.links() {
            let reason = |o: &Outcome| match o {
                Outcome::Failed(why) | Outcome::Refused(why) | Outcome::Slower(why) => !why.is_empty(),
                Outcome::Chosen | Outcome::Spare => true,
                Outcome::NotTried => false,
            };
            assert!(link.attempts.iter().all(|a| reason(&a.outcome)), "{case:?}: {:?}", link.attempts);
            let failed = link.attempts.iter().any(|a| matches!(a.outcome, Outcome::Failed(_)));
            // Memory that is refused in one form once may cross in another by the same path.
            let in_another_form = case.skip.is_some() && FOR_GOOD.contains(&case.door);
            // What a fault did to the proof that the host reaches a rank's memory does not touch its links.
            let at_reach =
                (0..comm.ranks()).any(|rank| comm.host_reaches(rank).err() != reach[rank as usize].as_deref());
            assert!(!was_met || failed || in_another_form || at_reach, "start {seed}, {case:?}: {:?}", link.attempts);
            let chosen = link.attempts.iter().find(|a| a.outcome == Outcome::Chosen).unwrap();
            assert_eq!((chosen.path, chosen.sync), (link.path, link.sync));
            assert!(proven.contains(&link.path), "{case:?}: {:?}", link.attempts);
        }
        if case.skip.is_none() && case.door == Door::Import {
            let shut = |rank: u32| case.ranks >> rank & 1 == 1;
            // A rank writes into what it imports of another.
            let may_be = |link: &Link| link.path == Path::Copied || link.path == Path::Peer && !shut(link.from);
            assert!(comm.links().iter().all(may_be), "start {seed}, {case:?}: {:?}", comm.links());
        }
        works(&comm, devices, seed);
        met += u64::from(was_met);
        lower += u64::from(comm.links()[0].path != usual);
        drop(comm);
        held.settles_at(devices);
        if seed == WARM {
            base = memory();
        }
    }
    let now = memory();
    let growth = (now.0.saturating_sub(base.0), now.1.saturating_sub(base.1));
    println!("{starts} starts: {met} met a fault, {lower} took another path; grown: {growth:?} bytes in use, resident");
    assert!(met > starts / 2, "most draws are to be met");
    assert!(growth.0 < 256 << 10 && growth.1 < 16 << 20, "{growth:?} bytes");
}

/// A device that imports nothing still takes what another writes into its memory.
fn peer_access_is_found_where_it_goes_one_way(devices: &[Arc<VulkanDevice>; 2], shut: u32) {
    let doors = devices[shut as usize].doors();
    doors.shut(Door::Import, Fault::Fail(vk::Result::ERROR_INVALID_EXTERNAL_HANDLE));
    let comm = builder(&ranks(devices)).build().unwrap();
    let one_way = |link: &Link| link.attempts.iter().find(|a| a.one_way).map(|a| a.outcome.clone());
    for link in comm.links() {
        let found = one_way(link);
        if link.from == shut {
            // Once one way is taken, the other is not tried.
            assert!(matches!(found, None | Some(Outcome::Failed(_))), "{link:?}");
        } else {
            assert!(found.as_ref().is_some_and(is_proven), "{link:?}");
        }
        assert!(link.path == Path::Copied || link.path == Path::Peer && link.from != shut, "{link:?}");
    }
    works(&comm, devices, 0);
    doors.open(Door::Import);
    assert!(builder(&ranks(devices)).build().unwrap().links().iter().all(|link| one_way(link).is_none()));
}

fn is_proven(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Chosen | Outcome::Spare | Outcome::Slower(_))
}

/// Where nothing can be done without, the start ends with an error that names the cause, and leaves nothing behind.
fn a_start_that_cannot_be_says_why(devices: &[Arc<VulkanDevice>; 2]) {
    drop(builder(&ranks(devices)).build().unwrap());
    let held = Held::now(devices);
    let doors = [Door::BufferCreate, Door::TimelineCreate, Door::Submit];
    for round in 0..if common::quick() { 3 } else { 50 } {
        for door in doors {
            let device = &devices[round % 2];
            device.doors().shut(door, Fault::Fail(vk::Result::ERROR_UNKNOWN));
            let built = builder(&ranks(devices)).build();
            device.doors().open(door);
            let error = built.err().unwrap_or_else(|| panic!("it started with {door:?} shut"));
            assert!(matches!(error, Error::Path { ranks: (0, 1), .. }), "{door:?}: {error}");
            assert!(error.to_string().contains("ERROR_UNKNOWN"), "{door:?}: {error}");
            held.settles_at(devices);
        }
    }
    let comm = builder(&ranks(devices)).build().unwrap();
    works(&comm, devices, 1);
}

//! The suite is tested too: devices with one fault each, planted in front of a sound one, and for each fault a test
//! that finds it. Faults that would need luck are made certain: what could happen always happens.
use allhands_contract::{conformance, conformance::Ran, *};
use allhands_cpu::{CpuDevice, Mode, Options};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

macro_rules! faults {
    ($($name:ident,)*) => {
        /// What is wrong with a device.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        enum Fault { None, $($name),* }
        const FAULTS: &[Fault] = &[$(Fault::$name),*];
    };
}
faults! {
    // Data.
    DropsTheLastCopy,
    DropsTheLastWordOfACopy,
    IgnoresTheOffsetOfASource,
    CopiesOneWordMore,
    ReadsNothing,
    WritesNothing,
    // Order.
    RunsListsInReverse,
    ReversesSubmissions,
    IgnoresWaits,
    // Timelines.
    SignalsEarly,
    NeverSignals,
    ShowsAValueTooLow,
    SaysReachedAtTheDeadline,
    SaysTimedOutWhenReached,
    WaitsForAllPoints,
    ForgetsWakesUnderWay,
    LosesEarlyWakes,
    AcceptsLowerSignals,
    // Kernels.
    FoldsInReverse,
    DropsTheLastSource,
    NeverFinishes,
    AlwaysFinishes,
    DividesBySources,
    MinDropsNan,
    KeepsNanBits,
    LosesNegativeZero,
    StopsAfter65535Elements,
    StoresOnce,
    // Refusals.
    AcceptsOverlap,
    AcceptsOutOfRange,
    AcceptsBrokenUnits,
    AcceptsStaleHandles,
    AcceptsForeignHandles,
    LetsOldHandlesReachStrangers,
    WritesBeforeItRefuses,
    SignalsWhatItRefused,
    // Lifetimes.
    FreesWhatIsInFlight,
    FreesWhatIsPrepared,
    TellsNobodyWhatItDestroys,
    UsesUpReusableCommands,
    CountsNothing,
    NeverCountsMemoryBack,
    ItsSiblingIsItself,
    // Sharing.
    ExportsOtherPages,
    ImportsOtherPages,
}

/// A device with a fault in front of a sound one.
struct Broken {
    inner: Arc<dyn Device>,
    fault: Fault,
    /// Moved on to the deadline of every wait that would be in vain, so that none is waited for.
    clock: Clock,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// What was prepared.
    ops: HashMap<CommandsId, Vec<Op>>,
    /// Submitted, and not yet told to the device behind.
    held: Vec<(Option<CommandsId>, Vec<Point>, Option<Point>)>,
    /// Commands destroyed meanwhile.
    dropped: Vec<CommandsId>,
    /// The newest handle of each place.
    newest: HashMap<u32, BufferId>,
    /// Signalled where nobody looks.
    hidden: Option<TimelineId>,
    hidden_value: u64,
    most_allocated: u64,
    /// Wakes that the device behind was not told of.
    forgotten_wakes: u64,
    /// Lists prepared only to see whether they are refused.
    tried: u64,
}

impl Broken {
    fn over(inner: Arc<dyn Device>, fault: Fault) -> Arc<dyn Device> {
        Arc::new(Broken { inner, fault, clock: Clock::manual(), state: Mutex::default() })
    }
    /// Whether its waits are often in vain.
    fn is_impatient(&self) -> bool {
        matches!(self.fault, Fault::NeverSignals | Fault::ForgetsWakesUnderWay | Fault::LosesEarlyWakes)
    }
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }
    fn at(&self, buffer: BufferId) -> BufferId {
        match self.fault {
            Fault::LetsOldHandlesReachStrangers if buffer.device == self.inner.info().id => {
                *self.state().newest.get(&buffer.index).unwrap_or(&buffer)
            }
            _ => buffer,
        }
    }
    fn range(&self, range: Range) -> Range {
        Range { buffer: self.at(range.buffer), ..range }
    }
    fn is_forgiven(&self, error: &Error) -> bool {
        match error {
            Error::Overlap { .. } => self.fault == Fault::AcceptsOverlap,
            Error::OutOfRange { .. } => self.fault == Fault::AcceptsOutOfRange,
            Error::Invalid { .. } => self.fault == Fault::AcceptsBrokenUnits,
            Error::Stale { .. } => self.fault == Fault::AcceptsStaleHandles,
            Error::Foreign { .. } => self.fault == Fault::AcceptsForeignHandles,
            _ => false,
        }
    }
    fn forgive<T>(&self, result: Result<T>, instead: impl FnOnce() -> Result<T>) -> Result<T> {
        result.or_else(|e| if self.is_forgiven(&e) { instead() } else { Err(e) })
    }
    fn hidden(&self) -> Result<Point> {
        let mut state = self.state();
        let timeline = match state.hidden {
            Some(timeline) => timeline,
            None => *state.hidden.insert(self.inner.create_timeline(false)?),
        };
        state.hidden_value += 1;
        Ok(Point { timeline, value: state.hidden_value })
    }
    fn finish(&self, point: Point) -> Result<()> {
        let far = Instant::now() + Duration::from_secs(60);
        self.inner.wait_any(&[point], self.inner.wakes(), far).map(|_| ())
    }
    /// Tells the device behind what was held back.
    fn flush(&self) -> Result<()> {
        let held = std::mem::take(&mut self.state().held);
        for (commands, waits, signal) in held {
            let signal = match signal {
                Some(signal) => signal,
                None => self.hidden()?,
            };
            self.inner.submit(&[Submission { commands, waits: &waits, signal }])?;
        }
        let dropped = std::mem::take(&mut self.state().dropped);
        dropped.into_iter().for_each(|c| self.inner.destroy_commands(c));
        Ok(())
    }
    fn is_held(&self) -> bool {
        matches!(self.fault, Fault::SignalsEarly | Fault::FreesWhatIsInFlight)
    }

    /// What is prepared instead of `ops`.
    fn altered(&self, ops: &[Op]) -> Vec<Op> {
        let mut ops = ops.to_vec();
        match self.fault {
            Fault::DropsTheLastCopy => {
                if let Some(at) = ops.iter().rposition(|op| matches!(op, Op::Copy { .. })) {
                    ops.remove(at);
                }
            }
            Fault::RunsListsInReverse => {
                let is_work = |op: &Op| !matches!(op, Op::Acquire { .. } | Op::Release { .. });
                if let Some(first) = ops.iter().position(is_work) {
                    let last = ops.iter().rposition(is_work).unwrap_or(first);
                    ops[first..=last].reverse();
                }
            }
            _ => ops.iter_mut().for_each(|op| self.alter(op)),
        }
        ops
    }
    fn alter(&self, op: &mut Op) {
        match op {
            Op::Copy { src, dst } => match self.fault {
                Fault::DropsTheLastWordOfACopy => {
                    let size = if src.size % 4 == 0 { src.size.saturating_sub(4) } else { src.size - 1 };
                    (src.size, dst.size) = (size, size);
                }
                Fault::CopiesOneWordMore if src.size % 4 == 0 => {
                    let end = |r: &Range| r.offset.saturating_add(r.size).saturating_add(4);
                    let fits = |r: &Range| self.inner.size(r.buffer).is_ok_and(|size| end(r) <= size);
                    if fits(src) && fits(dst) {
                        (src.size, dst.size) = (src.size + 4, dst.size + 4);
                    }
                }
                Fault::IgnoresTheOffsetOfASource if src.buffer != dst.buffer => src.offset = 0,
                Fault::LetsOldHandlesReachStrangers => (*src, *dst) = (self.range(*src), self.range(*dst)),
                _ => {}
            },
            Op::Kernel(k) => match self.fault {
                Fault::FoldsInReverse => k.sources.reverse(),
                Fault::DropsTheLastSource => k.sources.truncate(k.sources.len().saturating_sub(1).max(1)),
                Fault::NeverFinishes => k.finish = None,
                Fault::AlwaysFinishes => k.finish = k.finish.or(Some(k.sources.len() as u32 + 1)),
                Fault::DividesBySources => k.finish = k.finish.map(|_| k.sources.len() as u32),
                Fault::StoresOnce => k.stores.truncate(1),
                Fault::StopsAfter65535Elements => {
                    let most = 65532 * k.dtype.size();
                    k.stores.iter_mut().chain(&mut k.sources).for_each(|r| r.size = r.size.min(most));
                }
                _ => {}
            },
            Op::Acquire { range, .. } | Op::Release { range, .. } => *range = self.range(*range),
            Op::Barrier => {}
        }
    }
    /// Spoils what the kernels of `commands` stored.
    fn spoil(&self, ops: &[Op]) -> Result<()> {
        for op in ops {
            let Op::Kernel(k) = op else { continue };
            let width = k.dtype.size() as usize;
            // With a wire type, some stores hold elements of another width.
            if !k.dtype.is_float() || k.wire.is_some() || self.fault == Fault::MinDropsNan && k.op != ReduceOp::Min {
                continue;
            }
            for store in &k.stores {
                let mut bytes = vec![0; store.size as usize];
                self.inner.read(*store, &mut bytes)?;
                for x in bytes.chunks_mut(width) {
                    let zero = x[..width - 1].iter().all(|b| *b == 0);
                    let exponent = match k.dtype {
                        DataType::F16 => x[1] & 0x7c == 0x7c && (x[1] & 3 != 0 || !zero),
                        DataType::F64 => x[7] & 0x7f == 0x7f && x[6] & 0xf0 == 0xf0 && x[6] & 15 != 0,
                        _ => x[width - 1] & 0x7f == 0x7f && x[width - 2] & 0x80 != 0 && x[width - 2] & 0x7f != 0,
                    };
                    match self.fault {
                        Fault::MinDropsNan if exponent => x.fill(0),
                        Fault::KeepsNanBits if exponent => x[0] |= 1,
                        Fault::LosesNegativeZero if zero && x[width - 1] == 0x80 => x[width - 1] = 0,
                        _ => {}
                    }
                }
                self.inner.write(*store, &bytes)?;
            }
        }
        Ok(())
    }
    fn submit_one(&self, submission: &Submission<'_>) -> Result<()> {
        let Submission { commands, waits, signal } = *submission;
        match self.fault {
            Fault::SignalsEarly if waits.is_empty() => {
                self.flush()?;
                self.inner.submit(&[Submission { commands: None, ..*submission }])?;
                self.state().held.push((commands, vec![], None));
                Ok(())
            }
            Fault::FreesWhatIsInFlight if waits.is_empty() => {
                self.state().held.push((commands, waits.to_vec(), Some(signal)));
                Ok(())
            }
            Fault::FreesWhatIsInFlight => {
                self.flush()?;
                self.inner.submit(&[*submission])
            }
            Fault::NeverSignals => {
                let signal = self.hidden()?;
                self.inner.submit(&[Submission { signal, ..*submission }])
            }
            Fault::IgnoresWaits if !waits.is_empty() => {
                self.inner.submit(&[Submission { waits: &[], ..*submission }])?;
                self.finish(signal)
            }
            Fault::SignalsWhatItRefused => self.inner.submit(&[*submission]).inspect_err(|_| {
                let _ = self.inner.submit(&[Submission { commands: None, ..*submission }]);
            }),
            Fault::MinDropsNan | Fault::KeepsNanBits | Fault::LosesNegativeZero => {
                let ops = commands.and_then(|c| self.state().ops.get(&c).cloned()).unwrap_or_default();
                self.inner.submit(&[*submission])?;
                if !ops.iter().any(|op| matches!(op, Op::Kernel(_))) {
                    return Ok(());
                }
                self.finish(signal)?;
                self.spoil(&ops)
            }
            Fault::UsesUpReusableCommands => {
                self.inner.submit(&[*submission])?;
                commands.into_iter().for_each(|c| self.inner.destroy_commands(c));
                Ok(())
            }
            _ => self.forgive(self.inner.submit(&[*submission]), || Ok(())),
        }
    }
    fn poison(&self, buffer: BufferId) {
        if let Ok(size) = self.inner.size(buffer) {
            let _ = self.inner.write(Range::new(buffer, 0, size), &vec![0xdd; size as usize]);
        }
    }
}

impl Device for Broken {
    fn info(&self) -> &Info {
        self.inner.info()
    }
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }
    fn counters(&self) -> Counters {
        let mut counters = self.inner.counters();
        let mut state = self.state();
        counters.prepares -= state.tried;
        state.most_allocated = state.most_allocated.max(counters.allocated);
        match self.fault {
            Fault::CountsNothing => Counters::default(),
            Fault::NeverCountsMemoryBack => Counters { allocated: state.most_allocated, ..counters },
            _ => counters,
        }
    }
    fn clock(&self) -> Clock {
        if self.is_impatient() { self.clock.clone() } else { self.inner.clock() }
    }
    fn status(&self) -> Result<()> {
        self.inner.status()
    }
    fn sibling(&self) -> Result<Arc<dyn Device>> {
        match self.fault {
            Fault::ItsSiblingIsItself => Ok(Broken::over(self.inner.clone(), self.fault)),
            _ => Ok(Broken::over(self.inner.sibling()?, self.fault)),
        }
    }
    fn create_buffer(&self, desc: &BufferDesc) -> Result<BufferId> {
        let buffer = self.inner.create_buffer(desc)?;
        self.state().newest.insert(buffer.index, buffer);
        Ok(buffer)
    }
    fn destroy_buffer(&self, buffer: BufferId) {
        match self.fault {
            Fault::FreesWhatIsInFlight if !self.state().held.is_empty() => self.poison(buffer),
            Fault::FreesWhatIsPrepared => self.poison(buffer),
            _ => {}
        }
        self.inner.destroy_buffer(buffer);
    }
    fn watch(&self, watcher: Weak<dyn Watch>) {
        if self.fault != Fault::TellsNobodyWhatItDestroys {
            self.inner.watch(watcher);
        }
    }
    fn size(&self, buffer: BufferId) -> Result<u64> {
        self.forgive(self.inner.size(self.at(buffer)), || Ok(256))
    }
    fn read(&self, from: Range, to: &mut [u8]) -> Result<()> {
        match self.fault {
            Fault::ReadsNothing => Ok(()),
            _ => self.forgive(self.inner.read(self.range(from), to), || Ok(())),
        }
    }
    fn write(&self, to: Range, from: &[u8]) -> Result<()> {
        match self.fault {
            Fault::WritesNothing => Ok(()),
            _ => self.forgive(self.inner.write(self.range(to), from), || Ok(())),
        }
    }
    fn export(&self, buffer: BufferId, kind: SharedKind) -> Result<SharedMemory> {
        let memory = self.inner.export(buffer, kind)?;
        match self.fault {
            Fault::ExportsOtherPages => {
                let desc = BufferDesc { size: memory.size, memory: Memory::Upload, exportable: true };
                self.inner.export(self.inner.create_buffer(&desc)?, kind)
            }
            _ => Ok(memory),
        }
    }
    fn import(&self, memory: &SharedMemory) -> Result<BufferId> {
        if self.fault == Fault::ImportsOtherPages {
            return self.create_buffer(&BufferDesc { size: memory.size, memory: Memory::Upload, exportable: false });
        }
        let buffer = self.inner.import(memory)?;
        self.state().newest.insert(buffer.index, buffer);
        Ok(buffer)
    }
    fn create_timeline(&self, shareable: bool) -> Result<TimelineId> {
        self.inner.create_timeline(shareable)
    }
    fn destroy_timeline(&self, timeline: TimelineId) {
        if self.is_held() {
            let _ = self.flush();
        }
        self.inner.destroy_timeline(timeline);
    }
    fn value(&self, timeline: TimelineId) -> Result<u64> {
        if self.fault == Fault::FreesWhatIsInFlight {
            self.flush()?;
        }
        let value = self.forgive(self.inner.value(timeline), || Ok(0))?;
        match self.fault {
            Fault::ShowsAValueTooLow => Ok(value.saturating_sub(1)),
            _ => Ok(value),
        }
    }
    fn signal(&self, point: Point) -> Result<()> {
        let result = self.forgive(self.inner.signal(point), || Ok(()));
        if self.fault == Fault::AcceptsLowerSignals { Ok(()) } else { result }
    }
    fn wait_any(&self, points: &[Point], wakes: u64, deadline: Instant) -> Result<Waited> {
        if self.fault == Fault::FreesWhatIsInFlight {
            self.flush()?;
        }
        if self.fault == Fault::ForgetsWakesUnderWay && self.wakes() != wakes {
            return Ok(Waited::Woken);
        }
        let wakes = match self.fault {
            Fault::LosesEarlyWakes | Fault::ForgetsWakesUnderWay => self.inner.wakes(),
            _ => wakes,
        };
        let wait = |points: &[Point], deadline| {
            self.forgive(self.inner.wait_any(points, wakes, deadline), || Ok(Waited::TimedOut))
        };
        if self.is_impatient() {
            // What was submitted is soon reached; what is not reached by then, or not to be waited for, never is.
            let left = deadline.saturating_duration_since(self.clock.now());
            let waited = wait(points, Instant::now() + left.min(Duration::from_millis(200)))?;
            match waited {
                Waited::Reached => {}
                Waited::Woken => self.clock.advance(left.min(Duration::from_secs(1))),
                Waited::TimedOut => self.clock.advance(left),
            }
            return Ok(waited);
        }
        match self.fault {
            Fault::SaysTimedOutWhenReached if deadline <= self.clock().now() => Ok(Waited::TimedOut),
            Fault::SaysReachedAtTheDeadline => match wait(points, deadline)? {
                Waited::TimedOut => Ok(Waited::Reached),
                waited => Ok(waited),
            },
            Fault::WaitsForAllPoints if !points.is_empty() => {
                for point in points {
                    match wait(&[*point], deadline)? {
                        Waited::Reached => {}
                        waited => return Ok(waited),
                    }
                }
                Ok(Waited::Reached)
            }
            _ => wait(points, deadline),
        }
    }
    fn wakes(&self) -> u64 {
        self.inner.wakes() + self.state().forgotten_wakes
    }
    fn wake(&self) {
        match self.fault {
            Fault::ForgetsWakesUnderWay => self.state().forgotten_wakes += 1,
            _ => self.inner.wake(),
        }
    }
    fn prepare(&self, ops: &[Op]) -> Result<CommandsId> {
        let altered = self.altered(ops);
        if altered != ops && self.fault != Fault::LetsOldHandlesReachStrangers {
            // What the device behind refuses is refused.
            self.inner.destroy_commands(self.inner.prepare(ops)?);
            self.state().tried += 1;
        }
        let commands = self.forgive(self.inner.prepare(&altered), || self.inner.prepare(&[]));
        match &commands {
            Ok(commands) => drop(self.state().ops.insert(*commands, ops.to_vec())),
            Err(_) if self.fault == Fault::WritesBeforeItRefuses => {
                for range in ops.iter().flat_map(|op| op.accesses().1) {
                    let _ = self.inner.write(Range::new(range.buffer, 0, 1), &[0xdd]);
                }
            }
            Err(_) => {}
        }
        commands
    }
    fn destroy_commands(&self, commands: CommandsId) {
        let mut state = self.state();
        match state.held.is_empty() {
            true => self.inner.destroy_commands(commands),
            false => state.dropped.push(commands),
        }
    }
    fn submit(&self, submissions: &[Submission<'_>]) -> Result<()> {
        let last = submissions.len().saturating_sub(1);
        let reversed = |(i, s): (usize, &Submission<'_>)| match self.fault {
            Fault::ReversesSubmissions => {
                self.submit_one(&Submission { commands: submissions[last - i].commands, ..*s })
            }
            _ => self.submit_one(s),
        };
        submissions.iter().enumerate().try_for_each(reversed)
    }
}

/// What the suite says of a device with `fault` in front of one opened with `options`: how many tests passed, and
/// which failed.
fn verdict(fault: Fault, options: Options) -> (usize, Vec<(&'static str, String)>) {
    let device = Broken::over(CpuDevice::open(options).unwrap(), fault);
    let (mut passed, mut failed) = (0, Vec::new());
    conformance::run_all(&device, |name, outcome| match outcome {
        Ok(Ran::Passed) => passed += 1,
        Ok(Ran::NotApplicable(_)) => {}
        Err(why) => failed.push((name, why.clone())),
    });
    (passed, failed)
}

/// A few kernels stand for all, so that fifty runs of the suite take as long as a few.
fn few_kernels(limits: &mut Limits) {
    use {DataType::*, ReduceOp::*};
    limits.max_kernel_elements = 100_000;
    limits.kernels.retain(|k| matches!(k, (_, F32) | (Sum, F16) | (Max, I32) | (Average, U8) | (Min, F64)));
}

#[test]
fn a_sound_device_passes() {
    for restrict in [None, Some(few_kernels as fn(&mut Limits))] {
        let (passed, failed) = verdict(Fault::None, Options { restrict, ..Options::default() });
        assert!(failed.is_empty(), "{failed:#?}");
        assert!(passed >= 45, "the suite has more than {passed} tests that apply to a cpu device");
    }
}

#[test]
fn a_device_that_lacks_much_passes() {
    let lacks = |limits: &mut Limits| {
        few_kernels(limits);
        limits.gated = false;
        limits.resubmit = false;
        (limits.mapped, limits.unified) = (false, false);
        limits.memory_export.clear();
        limits.memory_import.clear();
        (limits.max_sources, limits.max_bindings) = (8, 4);
        (limits.write_granularity, limits.copy_granularity) = (4, 4);
    };
    for mode in [Mode::Threaded, Mode::Inline] {
        let (passed, failed) = verdict(Fault::None, Options { mode, restrict: Some(lacks), ..Options::default() });
        assert!(failed.is_empty(), "{failed:#?}");
        assert!(passed >= 30, "the suite has more than {passed} tests that apply to any device");
    }
}

#[test]
fn every_fault_is_found() {
    // Some of these wait in vain most of the time, so several go side by side.
    let (next, missed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let look = || {
        while let Some(&fault) = FAULTS.get(next.fetch_add(1, Ordering::Relaxed)) {
            let options = Options { restrict: Some(few_kernels), ..Options::default() };
            let (_, failed) = verdict(fault, options);
            let names = failed.iter().map(|f| f.0).collect::<Vec<_>>().join(" ");
            match failed.first() {
                Some((name, why)) => println!("{:<30} {names}\n{:<30} {name}: {why}", format!("{fault:?}"), ""),
                None => missed.lock().unwrap().push(fault),
            }
        }
    };
    std::thread::scope(|scope| (0..6).for_each(|_| drop(scope.spawn(look))));
    let missed = missed.into_inner().unwrap();
    assert!(missed.is_empty(), "no test finds {missed:?}");
}

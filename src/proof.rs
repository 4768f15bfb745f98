//! The proof of a path, on throwaway devices: a pattern goes both ways at once and is read back; then the same, timed.
//!
//! It runs on a thread of its own. A driver may never return from a call, and no deadline of ours ends that: then the
//! thread is left behind with its devices, and the next path is tried on others.
use crate::{
    Buffer, Result,
    cache::Measured,
    call::{Part, check},
    contract::{Clock, DataType, Device, DeviceId},
    engine::{Request, Scheduled, Setup},
    link::Sync,
    schedule::{Algorithm, Collective, Path},
};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

/// A proof that is so long without progress has failed.
const DEADLINE: Duration = Duration::from_secs(2);
/// From one step of a proof to the next: longer than the deadline, which says more of what went wrong.
const STEP: Duration = Duration::from_secs(5);
const ROUNDS: u32 = 3;
/// Odd, and more than one page.
const ELEMENTS: u64 = 4_099;
/// What bandwidth is measured with.
pub(crate) const BULK_ELEMENTS: u64 = 256 << 10;
const SMALL_ROUNDS: u32 = 9;
const BULK_ROUNDS: u32 = 4;
/// A proof that takes so many times as long as kept measurements say shows that they are of another time.
const STALE: u32 = 5;

/// The throwaway devices of those in use.
#[derive(Clone, Default)]
pub(crate) struct Siblings(Arc<Mutex<HashMap<DeviceId, Arc<dyn Device>>>>);

impl Siblings {
    pub fn of(&self, device: &Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        let id = device.info().id;
        if let Some(sibling) = self.lock().get(&id) {
            return Ok(sibling.clone());
        }
        let sibling = device.sibling()?; // Not under the lock: it may not return.
        self.lock().insert(id, sibling.clone());
        Ok(sibling)
    }
    pub fn throw_away(&self, device: &Arc<dyn Device>) {
        let thrown = self.lock().remove(&device.info().id);
        drop(thrown);
    }
    fn lock(&self) -> MutexGuard<'_, HashMap<DeviceId, Arc<dyn Device>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a proof found.
pub(crate) struct Proven {
    pub measured: Measured,
    /// How long measuring took; `None`: what was known agrees with the proof.
    pub took: Option<Duration>,
    /// Forms of memory that were refused before one was accepted, and why.
    pub refused: Vec<String>,
}

/// Proves the ways from the first device to the second and back, and measures them unless what is known agrees with the
/// proof.
pub(crate) fn prove(
    ways: [(Path, Sync); 2],
    devices: [&Arc<dyn Device>; 2],
    siblings: &Siblings,
    known: Option<Measured>,
    clock: &Clock,
) -> std::result::Result<Proven, String> {
    let (devices, siblings, clock) = (devices.map(Arc::clone), siblings.clone(), clock.clone());
    apart(move |step| {
        let text = |e: crate::Error| e.to_string();
        let open = |d| siblings.of(d).map_err(text).inspect(|_| step());
        let devices = [open(&devices[0])?, open(&devices[1])?];
        let engine = Scheduled::new(Setup::of_proof(devices.to_vec(), ways, clock)).map_err(text)?;
        step();
        let exchange = Exchange::new(&devices, &engine, step, ELEMENTS).map_err(text)?;
        let mut best = Duration::MAX;
        for round in 0..ROUNDS {
            best = best.min(exchange.prove(round)?);
        }
        if let Some(known) = known.filter(|m| best < m.bulk.max(m.small) * STALE && m.small < best * STALE) {
            return Ok(Proven { measured: known, took: None, refused: engine.refused() });
        }
        let measure = || {
            let exchange = Exchange::new(&devices, &engine, step, BULK_ELEMENTS)?;
            let mut small = exchange.time(1, SMALL_ROUNDS)?;
            small.sort();
            let bulk = exchange.time(BULK_ELEMENTS, BULK_ROUNDS)?;
            Ok(Measured { small: small[small.len() / 2], bulk: bulk.into_iter().min().unwrap_or_default() })
        };
        let start = Instant::now();
        let measured = measure().map_err(text)?;
        Ok(Proven { measured, took: Some(start.elapsed()), refused: engine.refused() })
    })
}

/// Runs `f` on a thread, which is left behind once it takes too long from one step, which `f` tells of, to the next.
pub(crate) fn apart<T: Send + 'static>(
    f: impl FnOnce(&dyn Fn()) -> std::result::Result<T, String> + Send + 'static,
) -> std::result::Result<T, String> {
    let (sender, receiver) = mpsc::channel();
    let run = move || {
        // Nobody listens to a thread that was left behind.
        let result = f(&|| drop(sender.send(None)));
        let _ = sender.send(Some(result));
    };
    let thread = thread::Builder::new().name("allhands proof".into()).spawn(run).map_err(|e| e.to_string())?;
    loop {
        match receiver.recv_timeout(STEP) {
            Ok(None) => {}
            Ok(Some(result)) => {
                let _ = thread.join(); // It has come to its end.
                return result;
            }
            Err(mpsc::RecvTimeoutError::Timeout) => return Err(format!("a driver did not return within {STEP:?}")),
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err("its proof panicked".into()),
        }
    }
}

/// An all-gather over two throwaway ranks.
struct Exchange<'a> {
    devices: &'a [Arc<dyn Device>],
    engine: &'a Scheduled,
    step: &'a dyn Fn(),
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
}

impl<'a> Exchange<'a> {
    fn new(
        devices: &'a [Arc<dyn Device>; 2],
        engine: &'a Scheduled,
        step: &'a dyn Fn(),
        elements: u64,
    ) -> Result<Self> {
        let make =
            |count| -> Result<Vec<Buffer>> { devices.iter().map(|d| Buffer::new(d, DataType::U32, count)).collect() };
        Ok(Exchange { devices, engine, step, inputs: make(elements)?, outputs: make(elements * 2)? })
    }
    fn run(&self, count: u64) -> Result<()> {
        let parts = self.inputs.iter().zip(&self.outputs);
        let parts = parts.map(|(i, o)| Part::new(i.slice(0, count), o.slice(0, count * 2))).collect();
        let call = check(self.devices, Collective::AllGather, None, parts)?;
        let request = Request { algorithm: Some(Algorithm::OneShot), deadline: DEADLINE };
        self.engine.start(&call, &request)?.wait()?;
        (self.step)();
        Ok(())
    }
    /// How long the call took.
    fn prove(&self, round: u32) -> std::result::Result<Duration, String> {
        let pattern = |rank: u32| -> Vec<u32> { (0..ELEMENTS as u32).map(|i| word(rank, round, i)).collect() };
        let mut took = Duration::ZERO;
        let mut run = || -> Result<Vec<Vec<u32>>> {
            for (rank, input) in (0..).zip(&self.inputs) {
                input.write(&pattern(rank))?;
            }
            for output in &self.outputs {
                output.write(&vec![0xdead_beef_u32; 2 * ELEMENTS as usize])?;
            }
            let start = Instant::now();
            self.run(ELEMENTS)?;
            took = start.elapsed();
            self.outputs.iter().map(|o| o.read()).collect()
        };
        let outputs = run().map_err(|e| e.to_string())?;
        for (reader, output) in outputs.iter().enumerate() {
            for writer in 0..2 {
                let got = &output[writer as usize * ELEMENTS as usize..][..ELEMENTS as usize];
                for (i, (got, want)) in got.iter().zip(pattern(writer)).enumerate() {
                    if *got != want {
                        let what = if *got == 0 { "zeros" } else { "other bytes" };
                        return Err(format!(
                            "{reader} reads {what} from {writer}: word {i} is {got:#010x} and was {want:#010x}"
                        ));
                    }
                }
            }
        }
        Ok(took)
    }
    fn time(&self, count: u64, rounds: u32) -> Result<Vec<Duration>> {
        self.run(count)?; // once to warm up
        let one = |_| {
            let start = Instant::now();
            self.run(count)?;
            Ok(start.elapsed())
        };
        (0..rounds).map(one).collect()
    }
}

/// A word that depends on who wrote it, when and where, and is never zero.
fn word(rank: u32, round: u32, index: u32) -> u32 {
    let mixed = (index ^ rank.rotate_left(30) ^ round.rotate_left(24)).wrapping_mul(0x9e37_79b1);
    (mixed ^ mixed >> 15) | 1
}

//! How each pair of ranks reaches each other: found, proven, measured.
//!
//! | path | what crosses | needs |
//! |---|---|---|
//! | peer | a write into the other's device memory | memory that both can export and import; proof |
//! | shared host | one host allocation that both have imported | import of host memory; proof |
//! | copied | each has its own host-visible staging, the CPU carries | nothing but proof |
//!
//! | sync | | |
//! |---|---|---|
//! | native | the other's timeline, waited on by the device | exportable and importable timelines, the same driver; proof |
//! | relay | the CPU carries progress | nothing |
//!
//! An import that succeeds proves nothing: there are drivers that return success and then read zeros, at full speed.
//! So each path is proven before it is used, on throwaway devices: a pattern that depends on address and attempt goes
//! both ways at once, under a deadline, through the same schedules, staging and relay as any later call. Then it is
//! timed, and a path slower than the next one is not used. A failed proof is no error: the next path is taken, and
//! the link keeps what was tried and why it lost.
use crate::{
    Buffer, Error, Result,
    arithmetic::{self, Arithmetic},
    cache::{Cache, Measured, Way, kind},
    call::{Part, check},
    contract::{Clock, DataType, Device, DeviceId, SharedKind},
    engine::{Request, Scheduled, Setup},
    peers::{self, Verdict},
    reach,
    schedule::{Algorithm, Collective, Path, cost::Speed},
    speed,
};
use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    str::FromStr,
    sync::Arc,
    time::{Duration, Instant},
};

/// How a rank learns that another is done.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum Sync {
    /// Its device waits on the other's timeline.
    Native,
    /// The CPU carries progress.
    Relay,
}

impl Sync {
    /// Every sync, best first.
    pub const ALL: [Sync; 2] = [Sync::Native, Sync::Relay];
    /// The name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Sync::Native => "native",
            Sync::Relay => "relay",
        }
    }
}

impl fmt::Display for Sync {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Sync {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let found = Sync::ALL.into_iter().find(|v| v.name() == s);
        found.ok_or_else(|| Error::Parse(format!("{s:?} is no sync; right are native and relay")))
    }
}

impl FromStr for Path {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let found = Path::ALL.into_iter().find(|v| v.name() == s);
        found.ok_or_else(|| Error::Parse(format!("{s:?} is no path; right are peer, shared-host and copied")))
    }
}

impl FromStr for Algorithm {
    type Err = Error;
    fn from_str(s: &str) -> Result<Self> {
        let found = Algorithm::ALL.into_iter().find(|v| v.name() == s);
        found.ok_or_else(|| {
            Error::Parse(format!("{s:?} is no algorithm; right are one-shot, two-shot, host, ring and tree"))
        })
    }
}

/// How data gets from rank `from` to rank `to`.
#[derive(Clone, Debug)]
pub struct Link {
    /// The writer.
    pub from: u32,
    /// The reader.
    pub to: u32,
    /// What is used.
    pub path: Path,
    /// What is used.
    pub sync: Sync,
    /// From a call on both ranks to both having four bytes of the other.
    pub latency: Duration,
    /// Bytes a second each way, both ways at once, from device memory to device memory.
    pub bandwidth: f64,
    /// What was tried, best first.
    pub attempts: Vec<Attempt>,
    /// Of the attempts that were proven and are worth using, in order: the first is used.
    proven: Vec<(usize, Measured)>,
}

impl Link {
    /// A link that nobody has tried, for a proof.
    pub(crate) fn untried(from: u32, to: u32, path: Path, sync: Sync) -> Self {
        Link { from, to, path, sync, latency: Duration::ZERO, bandwidth: 1e9, attempts: Vec::new(), proven: Vec::new() }
    }
    /// The same link under other numbers.
    pub(crate) fn between(&self, from: u32, to: u32) -> Self {
        Link { from, to, ..self.clone() }
    }
    fn choose(&mut self) -> bool {
        let Some(&(attempt, measured)) = self.proven.first() else { return false };
        let chosen = &mut self.attempts[attempt];
        chosen.outcome = Outcome::Chosen;
        (self.path, self.sync, self.latency) = (chosen.path, chosen.sync, measured.small);
        // A small exchange that was held up says nothing of the bytes.
        let moving = measured.bulk.saturating_sub(measured.small).max(measured.bulk / 2);
        self.bandwidth = (BULK_ELEMENTS * 4) as f64 / moving.as_secs_f64().max(1e-9);
        true
    }
    fn demote(&mut self, why: &Error) -> bool {
        if self.proven.len() < 2 {
            return false;
        }
        let (attempt, _) = self.proven.remove(0);
        self.attempts[attempt].outcome = Outcome::Failed(format!("on the devices in use: {why}"));
        self.choose()
    }
}

/// What was proven on throwaway devices failed on those in use: takes the next way wherever there is one. False if
/// there is none anywhere.
pub(crate) fn demote(links: &mut [Link], why: &Error) -> bool {
    links.iter_mut().filter_map(|link| link.demote(why).then_some(())).count() > 0
}

/// One way to cross that was looked at.
#[derive(Clone, PartialEq, Debug)]
pub struct Attempt {
    /// What crosses.
    pub path: Path,
    /// How progress is learnt of.
    pub sync: Sync,
    /// What came of it.
    pub outcome: Outcome,
}

/// What came of an attempt.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// Proven and used.
    Chosen,
    /// Proven, but the next one is faster.
    Slower(String),
    /// It did not deliver what was sent: how.
    Failed(String),
    /// A device lacks what it needs: what.
    Refused(String),
    /// Proven and not needed.
    Spare,
    /// Another was forced.
    NotTried,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Chosen => f.write_str("chosen"),
            Outcome::Slower(why) => write!(f, "slower: {why}"),
            Outcome::Failed(why) => write!(f, "failed its proof: {why}"),
            Outcome::Refused(why) => write!(f, "refused: {why}"),
            Outcome::Spare => f.write_str("proven, not needed"),
            Outcome::NotTried => f.write_str("not tried: another was forced"),
        }
    }
}

/// A choice that is forced rather than found.
#[derive(Clone, Copy, Default)]
pub(crate) struct Forced {
    pub path: Option<Path>,
    pub sync: Option<Sync>,
}

/// A proof that takes longer has failed.
const PROOF_DEADLINE: Duration = Duration::from_secs(2);
const PROOF_ROUNDS: u32 = 3;
/// Odd, and more than one page.
const PROOF_ELEMENTS: u64 = 4_099;
const BULK_ELEMENTS: u64 = 256 << 10;
const SMALL_ROUNDS: u32 = 9;
const BULK_ROUNDS: u32 = 4;
/// A path is slower than the next one if it takes so many times as long: less is noise.
const SLOWER: f64 = 1.5;

/// A pair is timed, even if one of the same kinds was, as long as timing has taken no longer than this in all.
const TIMING: Duration = Duration::from_millis(200);
/// A proof that takes so many times as long as kept measurements say shows that they are of another time.
const STALE: u32 = 5;

/// What a machine is found to be.
#[derive(Clone)]
pub(crate) struct Found {
    /// Of all ordered pairs of ranks; empty for one rank.
    pub links: Vec<Link>,
    /// Of each rank's device.
    pub speeds: Vec<Speed>,
    /// Of each rank's device.
    pub arithmetic: Vec<Arc<Arithmetic>>,
    /// Of each rank's device: whether host workers reach its memory; if not, why.
    pub reach: Vec<std::result::Result<(), String>>,
}

/// Tests, proves and measures.
pub(crate) fn find(devices: &[Arc<dyn Device>], forced: Forced, clock: &Clock) -> Result<Found> {
    let mut siblings = Siblings::default();
    let mut timing = Timing { cache: Cache::load(), made: HashMap::new(), spent: Duration::ZERO };
    let arithmetic =
        devices.iter().map(|d| Ok(arithmetic::verdict(&**d, &*siblings.of(d)?)?)).collect::<Result<_>>()?;
    let speeds = speeds(devices, &mut siblings, &mut timing.cache)?;
    let mut reached: HashMap<DeviceId, std::result::Result<(), String>> = HashMap::new();
    for device in devices {
        if let Entry::Vacant(unknown) = reached.entry(device.info().id) {
            unknown.insert(match forced.path {
                None => reach::prove(&siblings.of(device)?),
                Some(path) => Err(format!("not tried: the path {path} was forced")),
            });
        }
    }
    let reach = devices.iter().map(|d| reached[&d.info().id].clone()).collect();
    let mut known: HashMap<(DeviceId, DeviceId), Link> = HashMap::new();
    let mut links = Vec::new();
    for from in 0..devices.len() {
        for to in (0..devices.len()).filter(|to| *to != from) {
            let (a, b) = (from.min(to), from.max(to));
            let key = (devices[a].info().id, devices[b].info().id);
            if !known.contains_key(&key) {
                let link =
                    pair([a as u32, b as u32], [&devices[a], &devices[b]], &mut siblings, &mut timing, forced, clock)?;
                known.insert(key, link);
            }
            links.push(known[&key].between(from as u32, to as u32));
        }
    }
    timing.cache.save();
    Ok(Found { links, speeds, arithmetic, reach })
}

/// How fast each rank's device is while the others work too. Ranks that share a device share its speed.
fn speeds(devices: &[Arc<dyn Device>], siblings: &mut Siblings, cache: &mut Cache) -> Result<Vec<Speed>> {
    let mut distinct: Vec<&Arc<dyn Device>> = Vec::new();
    for device in devices {
        if distinct.iter().all(|d| d.info().id != device.info().id) {
            distinct.push(device);
        }
    }
    let kinds: Vec<String> = distinct.iter().map(|d| kind(&***d)).collect();
    let mut set = kinds.clone();
    set.sort();
    let set = set.join(", ");
    let kept: Option<Vec<Speed>> = kinds.iter().map(|kind| cache.speed(kind, &set)).collect();
    let speeds = match kept {
        Some(kept) => kept,
        None => {
            let throwaway = distinct.iter().map(|d| siblings.of(d)).collect::<Result<Vec<_>>>()?;
            let speeds = speed::measure(&throwaway)?;
            kinds.iter().zip(&speeds).for_each(|(kind, speed)| cache.keep_speed(kind, &set, *speed));
            speeds
        }
    };
    let of = |device: &Arc<dyn Device>| {
        let sharing = devices.iter().filter(|d| d.info().id == device.info().id).count() as f64;
        let place = distinct.iter().position(|d| d.info().id == device.info().id).unwrap_or(0);
        let speed = speeds[place];
        Speed { copy: speed.copy / sharing, reduce: speed.reduce / sharing, ..speed }
    };
    Ok(devices.iter().map(of).collect())
}

/// Measurements of the ways between devices: those kept, those made, and what making them took.
struct Timing {
    cache: Cache,
    made: HashMap<Way, Measured>,
    spent: Duration,
}

impl Timing {
    /// Measures, unless that was done before. `proof`: how long a call of the proof took at best.
    fn of(&mut self, way: Way, proof: Duration, measure: impl FnOnce() -> Result<Measured>) -> Result<Measured> {
        let known = match self.made.get(&way) {
            Some(made) => Some(*made).filter(|_| self.spent > TIMING),
            None => self.cache.way(&way),
        };
        if let Some(known) = known.filter(|m| proof < m.bulk.max(m.small) * STALE && m.small < proof * STALE) {
            return Ok(known);
        }
        let start = Instant::now();
        let measured = measure()?;
        self.spent += start.elapsed();
        self.made.insert(way.clone(), measured);
        self.cache.keep_way(way, measured);
        Ok(measured)
    }
}

/// The throwaway devices of those in use.
#[derive(Default)]
struct Siblings(HashMap<DeviceId, Arc<dyn Device>>);

impl Siblings {
    fn of(&mut self, device: &Arc<dyn Device>) -> Result<Arc<dyn Device>> {
        if let Some(sibling) = self.0.get(&device.info().id) {
            return Ok(sibling.clone());
        }
        let sibling = device.sibling()?;
        self.0.insert(device.info().id, sibling.clone());
        Ok(sibling)
    }
    /// What a failed proof left in its queue must not hold up the next one.
    fn throw_away(&mut self, devices: [&Arc<dyn Device>; 2]) {
        devices.into_iter().for_each(|d| drop(self.0.remove(&d.info().id)));
    }
}

fn pair(
    ranks: [u32; 2],
    devices: [&Arc<dyn Device>; 2],
    siblings: &mut Siblings,
    timing: &mut Timing,
    forced: Forced,
    clock: &Clock,
) -> Result<Link> {
    let mut attempts = Vec::new();
    let mut proven: Vec<(usize, Measured)> = Vec::new();
    for path in Path::ALL {
        for sync in Sync::ALL {
            let wanted = forced.path.is_none_or(|p| p == path) && forced.sync.is_none_or(|s| s == sync);
            let outcome = if !wanted {
                Outcome::NotTried
            } else if let Some(why) = refusal(path, sync, devices).or_else(|| unproven(path, devices, forced)) {
                Outcome::Refused(why)
            } else {
                let throwaway = [siblings.of(devices[0])?, siblings.of(devices[1])?];
                match prove((path, sync), &throwaway, timing, clock) {
                    Ok(measured) => {
                        proven.push((attempts.len(), measured));
                        Outcome::Spare
                    }
                    Err(why) => {
                        siblings.throw_away(devices);
                        Outcome::Failed(why)
                    }
                }
            };
            attempts.push(Attempt { path, sync, outcome });
        }
    }
    // One that the next is faster than is not worth using.
    while let [(first, a), (_, b), ..] = proven[..]
        && a.bulk > b.bulk.mul_f64(SLOWER)
    {
        let why = format!("1 MiB in {:.0?}, and in {:.0?} by the next", a.bulk, b.bulk);
        attempts[first].outcome = Outcome::Slower(why);
        proven.remove(0);
    }
    for attempt in attempts.iter().filter(|a| matches!(a.outcome, Outcome::Failed(_))) {
        log::warn!("ranks {} and {}: {} with {} {}", ranks[0], ranks[1], attempt.path, attempt.sync, attempt.outcome);
    }
    let mut link = Link { attempts, proven, ..Link::untried(ranks[0], ranks[1], Path::Copied, Sync::Relay) };
    if link.choose() {
        return Ok(link);
    }
    let tried = link.attempts.iter().filter(|a| a.outcome != Outcome::NotTried);
    let why: Vec<String> = tried.map(|a| format!("{} with {}: {}", a.path, a.sync, a.outcome)).collect();
    Err(Error::Path { ranks: (ranks[0], ranks[1]), why: why.join("; ") })
}

/// Why peer access is not even tried: between two cards it can hang the host, so it takes a kept proof, or to be forced.
fn unproven(path: Path, devices: [&Arc<dyn Device>; 2], forced: Forced) -> Option<String> {
    let addresses = devices.map(|d| d.info().address.as_deref());
    let [Some(a), Some(b)] = addresses else { return None };
    if path != Path::Peer || a == b {
        return None;
    }
    if forced.path == Some(Path::Peer) {
        log::warn!("peer access between {a} and {b} is proven in this process; `allhands prove` does it in a child");
        return None;
    }
    match peers::kept(&**devices[0], &**devices[1]) {
        Some(Verdict::Proven) => None,
        Some(Verdict::Failed(why)) => Some(format!("`allhands prove` {why}")),
        None => Some("peer access is off until `allhands prove` has shown it".into()),
    }
}

/// What a device lacks for it.
fn refusal(path: Path, sync: Sync, devices: [&Arc<dyn Device>; 2]) -> Option<String> {
    let lacks = |what: &str, has: &dyn Fn(&Arc<dyn Device>) -> bool| {
        let without: Vec<_> = devices.into_iter().filter(|d| !has(d)).map(|d| d.info().backend).collect();
        (!without.is_empty()).then(|| format!("{} cannot {what}", without.join(" and ")))
    };
    if sync == Sync::Native {
        if path == Path::Copied {
            return Some("the CPU that carries the data carries progress too".into());
        }
        return lacks("export and import timelines", &|d| d.limits().timeline_export && d.limits().timeline_import);
    }
    match path {
        Path::Peer => lacks("export and import device memory", &|d| {
            let across = |kinds: &[SharedKind]| kinds.iter().any(|k| *k != SharedKind::Host);
            across(&d.limits().memory_export) && across(&d.limits().memory_import)
        }),
        Path::SharedHost => lacks("import host memory", &|d| d.limits().memory_import.contains(&SharedKind::Host)),
        Path::Copied => None,
    }
}

/// Sends a pattern both ways at once and reads it back; then the same, timed.
fn prove(
    (path, sync): (Path, Sync),
    devices: &[Arc<dyn Device>; 2],
    timing: &mut Timing,
    clock: &Clock,
) -> std::result::Result<Measured, String> {
    let setup = Setup::alike(devices.to_vec(), path, sync, clock.clone());
    let engine = Scheduled::new(setup).map_err(|e| e.to_string())?;
    let exchange = Exchange::new(devices, &engine, PROOF_ELEMENTS).map_err(|e| e.to_string())?;
    let mut proof = Duration::MAX;
    for round in 0..PROOF_ROUNDS {
        proof = proof.min(exchange.prove(round)?);
    }
    let measure = || {
        let exchange = Exchange::new(devices, &engine, BULK_ELEMENTS)?;
        let mut small = exchange.time(1, SMALL_ROUNDS)?;
        small.sort();
        let bulk = exchange.time(BULK_ELEMENTS, BULK_ROUNDS)?;
        Ok(Measured { small: small[small.len() / 2], bulk: bulk.into_iter().min().unwrap_or_default() })
    };
    let way = (kind(&*devices[0]), kind(&*devices[1]), path, sync);
    timing.of(way, proof, measure).map_err(|e: Error| e.to_string())
}

/// An all-gather over two throwaway ranks.
struct Exchange<'a> {
    devices: &'a [Arc<dyn Device>],
    engine: &'a Scheduled,
    inputs: Vec<Buffer>,
    outputs: Vec<Buffer>,
}

impl<'a> Exchange<'a> {
    fn new(devices: &'a [Arc<dyn Device>; 2], engine: &'a Scheduled, elements: u64) -> Result<Self> {
        let make =
            |count| -> Result<Vec<Buffer>> { devices.iter().map(|d| Buffer::new(d, DataType::U32, count)).collect() };
        Ok(Exchange { devices, engine, inputs: make(elements)?, outputs: make(elements * 2)? })
    }
    fn run(&self, count: u64) -> Result<()> {
        let parts = self.inputs.iter().zip(&self.outputs);
        let parts = parts.map(|(i, o)| Part::new(i.slice(0, count), o.slice(0, count * 2))).collect();
        let call = check(self.devices, Collective::AllGather, None, parts)?;
        self.engine.start(&call, &Request { algorithm: Some(Algorithm::OneShot), deadline: PROOF_DEADLINE })?.wait()
    }
    /// How long the call took.
    fn prove(&self, round: u32) -> std::result::Result<Duration, String> {
        let pattern = |rank: u32| -> Vec<u32> { (0..PROOF_ELEMENTS as u32).map(|i| word(rank, round, i)).collect() };
        let mut took = Duration::ZERO;
        let mut run = || -> Result<Vec<Vec<u32>>> {
            for (rank, input) in (0..).zip(&self.inputs) {
                input.write(&pattern(rank))?;
            }
            for output in &self.outputs {
                output.write(&vec![0xdead_beef_u32; 2 * PROOF_ELEMENTS as usize])?;
            }
            let start = Instant::now();
            self.run(PROOF_ELEMENTS)?;
            took = start.elapsed();
            self.outputs.iter().map(|o| o.read()).collect()
        };
        let outputs = run().map_err(|e| e.to_string())?;
        for (reader, output) in outputs.iter().enumerate() {
            for writer in 0..2 {
                let got = &output[writer as usize * PROOF_ELEMENTS as usize..][..PROOF_ELEMENTS as usize];
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

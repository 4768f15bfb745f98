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
//! timed, and a path slower than the next one is not used. Where peer access does not go both ways, it is tried each way
//! alone. A failed proof is no error: the next path is taken, and
//! the link keeps what was tried and why it lost.
use crate::{
    Error, Result,
    arithmetic::{self, Arithmetic},
    cache::{Cache, Measured, Way, kind},
    contract::{Clock, Device, DeviceId, SharedKind},
    peers::{self, Verdict},
    proof::{self, Siblings},
    reach,
    schedule::{Algorithm, Path, cost::Speed},
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
    /// Of the attempts that were proven, best first: that one is used.
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
        self.bandwidth = (proof::BULK_ELEMENTS * 4) as f64 / moving.as_secs_f64().max(1e-9);
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
    /// Proven for this direction alone, while data went the other way as it does on that link.
    pub one_way: bool,
    /// Where it was proven: the forms of memory that were refused before one was accepted, and why.
    pub refused: Vec<String>,
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

/// A path is slower than the next one if it takes so many times as long: less is noise.
const SLOWER: f64 = 1.5;

/// A pair is timed, even if one of the same kinds was, as long as timing has taken no longer than this in all.
const TIMING: Duration = Duration::from_millis(200);

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
    /// How long measuring speeds and pairs took, beyond their proofs; nothing where what was kept could be used.
    pub measuring: Duration,
}

/// Tests, proves and measures.
pub(crate) fn find(devices: &[Arc<dyn Device>], forced: Forced, clock: &Clock) -> Result<Found> {
    let siblings = Siblings::default();
    let mut timing = Timing { cache: Cache::load(), made: HashMap::new(), spent: Duration::ZERO };
    let verdict = |d: &Arc<dyn Device>| {
        let test = || arithmetic::verdict(&**d, || siblings.of(d));
        twice(test, || siblings.throw_away(d))
    };
    let arithmetic = devices.iter().map(verdict).collect::<Result<_>>()?;
    let (speeds, mut measuring) = speeds(devices, &siblings, &mut timing.cache)?;
    let mut reached: HashMap<DeviceId, std::result::Result<(), String>> = HashMap::new();
    for device in devices {
        if let Entry::Vacant(unknown) = reached.entry(device.info().id) {
            unknown.insert(match forced.path {
                None => reach::prove(device, &siblings),
                Some(path) => Err(format!("not tried: the path {path} was forced")),
            });
        }
    }
    let reach = devices.iter().map(|d| reached[&d.info().id].clone()).collect();
    let mut known: HashMap<(DeviceId, DeviceId), [Link; 2]> = HashMap::new();
    let mut links = Vec::new();
    for from in 0..devices.len() {
        for to in (0..devices.len()).filter(|to| *to != from) {
            let (a, b) = (from.min(to), from.max(to));
            let key = (devices[a].info().id, devices[b].info().id);
            let (ranks, both) = ([a as u32, b as u32], [&devices[a], &devices[b]]);
            let found = match known.entry(key) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(unknown) => unknown.insert(pair(ranks, both, &siblings, &mut timing, forced, clock)?),
            };
            links.push(found[usize::from(from > to)].between(from as u32, to as u32));
        }
    }
    timing.cache.save();
    measuring += timing.spent;
    Ok(Found { links, speeds, arithmetic, reach, measuring })
}

/// How fast each rank's device is while the others work too, and how long it took to measure. Ranks that share a device
/// share its speed.
fn speeds(devices: &[Arc<dyn Device>], siblings: &Siblings, cache: &mut Cache) -> Result<(Vec<Speed>, Duration)> {
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
    let (speeds, took) = match kept {
        Some(kept) => (kept, Duration::ZERO),
        None => {
            let measure = || {
                let throwaway = distinct.iter().map(|d| siblings.of(d)).collect::<Result<Vec<_>>>()?;
                let start = Instant::now();
                Ok((speed::measure(&throwaway)?, start.elapsed()))
            };
            let (speeds, took) = twice(measure, || distinct.iter().for_each(|d| siblings.throw_away(d)))?;
            kinds.iter().zip(&speeds).for_each(|(kind, speed)| cache.keep_speed(kind, &set, *speed));
            (speeds, took)
        }
    };
    let of = |device: &Arc<dyn Device>| {
        let sharing = devices.iter().filter(|d| d.info().id == device.info().id).count() as f64;
        let place = distinct.iter().position(|d| d.info().id == device.info().id).unwrap_or(0);
        let speed = speeds[place];
        Speed { copy: speed.copy / sharing, reduce: speed.reduce / sharing, ..speed }
    };
    Ok((devices.iter().map(of).collect(), took))
}

/// A device that fails once may do it right on a fresh throwaway.
fn twice<T>(f: impl Fn() -> Result<T>, throw_away: impl FnOnce()) -> Result<T> {
    f().or_else(|error| {
        log::warn!("{error}; tried again");
        throw_away();
        f()
    })
}

/// Measurements of the ways between devices: those kept, those made, and what making them took.
struct Timing {
    cache: Cache,
    made: HashMap<Way, Measured>,
    spent: Duration,
}

impl Timing {
    /// What is known of a way, as long as its proof does not show otherwise.
    fn known(&self, way: &Way) -> Option<Measured> {
        match self.made.get(way) {
            Some(made) => Some(*made).filter(|_| self.spent > TIMING),
            None => self.cache.way(way),
        }
    }
    /// What was measured just now, and how long that took.
    fn keep(&mut self, way: Way, measured: Measured, took: Duration) {
        self.spent += took;
        self.made.insert(way.clone(), measured);
        self.cache.keep_way(way, measured);
    }
}

/// The target under which the log tells where a driver is asked for what it may not have.
const PROBE: &str = "allhands::probe";

fn pair(
    ranks: [u32; 2],
    devices: [&Arc<dyn Device>; 2],
    siblings: &Siblings,
    timing: &mut Timing,
    forced: Forced,
    clock: &Clock,
) -> Result<[Link; 2]> {
    let mut attempts = Vec::new();
    let mut proven: Vec<(usize, Measured)> = Vec::new();
    for path in Path::ALL {
        for sync in Sync::ALL {
            let wanted = forced.path.is_none_or(|p| p == path) && forced.sync.is_none_or(|s| s == sync);
            let mut refused = Vec::new();
            let outcome = if !wanted {
                Outcome::NotTried
            } else if let Some(why) = refusal(path, sync, devices).or_else(|| unproven(path, devices, forced)) {
                Outcome::Refused(why)
            } else {
                let way = (kind(&**devices[0]), kind(&**devices[1]), path, sync);
                let known = timing.known(&way);
                // What a failed proof left in their queues must not hold up the next one.
                let throw_away = || devices.iter().for_each(|d| siblings.throw_away(d));
                let prove = || {
                    log::debug!(target: PROBE, "begins: {path} with {sync} between ranks {} and {}", ranks[0], ranks[1]);
                    let outcome = proof::prove([(path, sync); 2], devices, siblings, known, clock);
                    log::debug!(target: PROBE, "ended");
                    outcome
                };
                // The last resort gets another chance: the machine may have been busy, or a device hiccuped.
                let last = proven.is_empty() && path == Path::Copied;
                let retry = |why: String| {
                    if last {
                        throw_away();
                        prove()
                    } else {
                        Err(why)
                    }
                };
                match prove().or_else(retry) {
                    Ok(proof) => {
                        if let Some(took) = proof.took {
                            timing.keep(way, proof.measured, took);
                        }
                        refused = proof.refused;
                        proven.push((attempts.len(), proof.measured));
                        Outcome::Spare
                    }
                    Err(why) => {
                        throw_away();
                        Outcome::Failed(why)
                    }
                }
            };
            attempts.push(Attempt { path, sync, outcome, one_way: false, refused });
        }
    }
    // One that the next is faster than is not worth using, unless all others fail.
    let mut slower = Vec::new();
    while let [(first, a), (_, b), ..] = proven[..]
        && a.bulk > b.bulk.mul_f64(SLOWER)
    {
        attempts[first].outcome = slower_than(a, b);
        slower.push(proven.remove(0));
    }
    proven.extend(slower);
    for attempt in attempts.iter().filter(|a| matches!(a.outcome, Outcome::Failed(_))) {
        log::warn!("ranks {} and {}: {} with {} {}", ranks[0], ranks[1], attempt.path, attempt.sync, attempt.outcome);
    }
    let mut link = Link { attempts, proven, ..Link::untried(ranks[0], ranks[1], Path::Copied, Sync::Relay) };
    if link.choose() {
        let mut links = [link.between(ranks[0], ranks[1]), link.between(ranks[1], ranks[0])];
        if forced.path.is_none() && unproven(Path::Peer, devices, forced).is_none() {
            // Not both: it was tried both ways at once.
            timing.spent += one_way(&mut links[0], 0, devices, siblings, clock);
            if links[0].path != Path::Peer {
                timing.spent += one_way(&mut links[1], 1, devices, siblings, clock);
            }
        }
        return Ok(links);
    }
    let tried = link.attempts.iter().filter(|a| a.outcome != Outcome::NotTried);
    let why: Vec<String> = tried.map(|a| format!("{} with {}: {}", a.path, a.sync, a.outcome)).collect();
    Err(Error::Path { ranks: (ranks[0], ranks[1]), why: why.join("; ") })
}

/// Takes peer access in one direction where it is to be had in that alone: of two drivers one may import what the other
/// exports, and not the other way round. Returns how long measuring it took.
fn one_way(
    link: &mut Link,
    direction: usize,
    devices: [&Arc<dyn Device>; 2],
    siblings: &Siblings,
    clock: &Clock,
) -> Duration {
    let (writer, reader) = (devices[direction], devices[1 - direction]);
    let (out, into) = (&reader.limits().memory_export, &writer.limits().memory_import);
    let crosses = out.iter().any(|kind| *kind != SharedKind::Host && into.contains(kind));
    let both_ways = link.proven.iter().any(|(attempt, _)| link.attempts[*attempt].path == Path::Peer);
    let Some(&(_, measured)) = link.proven.first().filter(|_| crosses && !both_ways) else {
        return Duration::ZERO;
    };
    let mut ways = [(link.path, link.sync); 2];
    ways[direction].0 = Path::Peer;
    log::debug!(target: PROBE, "begins: peer one way between ranks {} and {}", link.from, link.to);
    let proof = proof::prove(ways, devices, siblings, None, clock);
    log::debug!(target: PROBE, "ended");
    let (path, sync) = ways[direction];
    let mut attempt = Attempt { path, sync, outcome: Outcome::Spare, one_way: true, refused: Vec::new() };
    let took = proof.as_ref().ok().and_then(|p| p.took).unwrap_or_default();
    match proof {
        Ok(proof) if proof.measured.bulk > measured.bulk.mul_f64(SLOWER) => {
            attempt.outcome = slower_than(proof.measured, measured);
        }
        Ok(proof) => {
            attempt.refused = proof.refused;
            link.attempts.iter_mut().filter(|a| a.outcome == Outcome::Chosen).for_each(|a| a.outcome = Outcome::Spare);
            link.proven.insert(0, (link.attempts.len(), proof.measured));
        }
        Err(why) => {
            devices.iter().for_each(|d| siblings.throw_away(d));
            attempt.outcome = Outcome::Failed(why);
        }
    }
    link.attempts.push(attempt);
    link.choose();
    took
}

fn slower_than(this: Measured, next: Measured) -> Outcome {
    Outcome::Slower(format!("1 MiB in {:.0?}, and in {:.0?} by the next", this.bulk, next.bulk))
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

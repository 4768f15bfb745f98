//! The memory that data crosses in.
//!
//! Kept small on purpose: on some drivers every signal of a timeline costs in proportion to the resident size of what
//! was imported, so ten megabytes left over from one long message slow down thousands of short ones. Hence two
//! pools. Short messages have slots of their own, four banks deep; the pool of long ones is made on demand and given
//! back after a run of short operations. A pool never waits: when it is too small another is made beside it, new
//! calls use that, and the old one goes with the last call that uses it.
use crate::{
    Result,
    contract::{self, BufferDesc, BufferId, Device, Domain, Memory, Range, SharedKind},
    schedule::{Actor, Home, Path, lower::Links},
    trace::Trace,
};
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Bytes that each arena needs in one bank: its owner, and what kind of memory.
pub(crate) type Needs = BTreeMap<(Actor, Home), u64>;

/// Up to so many bytes an arena and bank, a call uses the pool of short messages.
const SHORT: u64 = 256 << 10;
const SHORT_BANKS: u64 = 4;
const LONG_BANKS: u64 = 2;
/// The pool of long messages goes after so many calls in a row that did not need it.
const GIVE_BACK_AFTER: u32 = 64;
/// Arenas grow in such steps, so that slightly longer messages find room.
const GROW: u64 = 64 << 10;

/// The pools of a communicator.
#[derive(Default)]
pub(crate) struct Staging {
    short: Option<Arc<Pool>>,
    long: Option<Arc<Pool>>,
    unused: u32,
    grow_only: bool,
}

/// One turn at a pool: call k has bank k mod B. Dropped, it was never taken; [`Turn::take`] makes it count.
pub(crate) struct Turn {
    pub pool: Arc<Pool>,
    pub bank: u64,
    /// Of each actor, its last submission that used the bank: the first of this call follows them all.
    pub after: Vec<u64>,
}

impl Turn {
    /// The call is made. `last`: what each actor has submitted with it.
    pub fn take(&self, last: Vec<u64>) {
        let mut turns = self.pool.lock();
        turns.next += 1;
        turns.last[self.bank as usize] = last;
    }
}

impl Staging {
    /// From now on one pool that only grows serves every call: the policy that ours is compared with.
    pub fn only_grow(&mut self) {
        self.grow_only = true;
    }
    /// Room for one call. A failure leaves the pools as they were.
    pub fn turn(&mut self, devices: &Devices, links: &Links, needs: &Needs, trace: Option<&Trace>) -> Result<Turn> {
        let is_short = !self.grow_only && needs.values().all(|bytes| *bytes <= SHORT);
        let (place, banks) = if is_short { (&mut self.short, SHORT_BANKS) } else { (&mut self.long, LONG_BANKS) };
        let pool = match place {
            Some(pool) if pool.holds(needs) => pool.clone(),
            _ => {
                let mut sizes: Needs = needs.iter().map(|(k, v)| (*k, v.next_multiple_of(GROW))).collect();
                for (arena, bytes) in place.iter().flat_map(|old| &old.sizes) {
                    let size = sizes.entry(*arena).or_default();
                    *size = (*size).max(*bytes);
                }
                let pool = Arc::new(Pool::new(devices, links, sizes, banks, trace)?);
                *place = Some(pool.clone());
                pool
            }
        };
        self.unused = if is_short { self.unused + 1 } else { 0 };
        if self.unused >= GIVE_BACK_AFTER {
            self.long = None;
        }
        Ok(pool.next_turn())
    }
    /// Bytes in the pools that calls may still get.
    pub fn bytes(&self) -> u64 {
        self.pools().map(|p| p.sizes.values().sum::<u64>() * p.banks).sum()
    }
    /// Forms of memory that could not be had where another then could, and why.
    pub fn refused(&self) -> Vec<String> {
        self.pools().flat_map(|p| p.refused.iter().cloned()).collect()
    }
    /// Fills all staging with a pattern, so that a read of what was never written shows. Only while nothing runs.
    pub fn poison(&self, devices: &Devices, pattern: u32) -> Result<()> {
        for pool in self.pools() {
            for (&(owner, home), buffer) in &pool.buffers {
                let device = devices.of_arena(owner, home);
                let bytes = pattern.to_ne_bytes().repeat(device.size(*buffer)? as usize / 4);
                device.write(Range::new(*buffer, 0, bytes.len() as u64), &bytes)?;
            }
        }
        Ok(())
    }
    fn pools(&self) -> impl Iterator<Item = &Arc<Pool>> {
        self.short.iter().chain(&self.long)
    }
}

/// The devices of the actors: ranks first, then the host worker of each rank.
#[derive(Clone)]
pub(crate) struct Devices {
    pub ranks: Vec<Arc<dyn Device>>,
    pub workers: Vec<Arc<dyn Device>>,
}

impl Devices {
    pub fn of(&self, actor: Actor) -> &Arc<dyn Device> {
        let n = self.ranks.len();
        self.ranks.get(actor as usize).unwrap_or_else(|| &self.workers[actor as usize - n])
    }
    pub fn actors(&self) -> Actor {
        (self.ranks.len() + self.workers.len()) as Actor
    }
    /// Whether an actor has business in an arena: host workers in all host-visible ones, a rank in those that a path
    /// lets it reach. Nobody imports more than that: what is imported costs.
    fn reaches(&self, actor: Actor, owner: Actor, home: Home, links: &Links) -> bool {
        let n = self.ranks.len() as Actor;
        match home {
            Home::Inbox => actor < n && actor != owner && links.path(owner, actor) == Path::Peer,
            Home::Shared if actor < n => {
                let with = |other| [links.path(actor, other), links.path(other, actor)].contains(&Path::SharedHost);
                (0..n).any(|other| other != actor && with(other))
            }
            Home::Shared | Home::Upload | Home::Download | Home::Mapped => actor >= n,
            _ => false,
        }
    }
    /// Who allocates a buffer: shared host memory is a host worker's, the rest the owner's own.
    fn of_arena(&self, owner: Actor, home: Home) -> &Arc<dyn Device> {
        let n = self.ranks.len() as Actor;
        if home == Home::Shared && owner < n { &self.workers[owner as usize] } else { self.of(owner) }
    }
}

/// Arenas of one size, in several banks.
pub(crate) struct Pool {
    devices: Devices,
    /// Bytes of each arena in one bank.
    sizes: Needs,
    /// Where in its buffer each arena starts.
    starts: Needs,
    banks: u64,
    /// By [`allocation`].
    buffers: BTreeMap<(Actor, Home), BufferId>,
    /// What each other actor calls the buffer.
    views: BTreeMap<(Actor, Home, Actor), BufferId>,
    turns: Mutex<Turns>,
    /// Forms of memory that could not be had where another then could, and why.
    refused: Vec<String>,
}

struct Turns {
    next: u64,
    /// Of each bank and actor, the last submission that used it.
    last: Vec<Vec<u64>>,
}

impl Pool {
    fn new(devices: &Devices, links: &Links, sizes: Needs, banks: u64, trace: Option<&Trace>) -> Result<Self> {
        let turns = Turns { next: 0, last: vec![vec![0; devices.actors() as usize]; banks as usize] };
        let mut pool = Pool {
            devices: devices.clone(),
            sizes: Needs::new(),
            starts: Needs::new(),
            banks,
            buffers: BTreeMap::new(),
            views: BTreeMap::new(),
            turns: Mutex::new(turns),
            refused: Vec::new(),
        };
        // On an error the drop of `pool` frees what was made so far.
        let mut buffers = Needs::new();
        for (&arena, bytes) in &sizes {
            let size = buffers.entry(allocation(arena)).or_default();
            pool.starts.insert(arena, *size);
            *size += bytes * banks;
        }
        pool.sizes = sizes;
        for (allocation, size) in buffers {
            pool.add_buffer(allocation, size, links, trace)?;
        }
        Ok(pool)
    }
    fn add_buffer(
        &mut self,
        (owner, home): (Actor, Home),
        size: u64,
        links: &Links,
        trace: Option<&Trace>,
    ) -> Result<()> {
        let memory = match home {
            Home::Upload => Memory::Upload,
            Home::Download => Memory::Download,
            Home::Mapped | Home::Shared => Memory::Mapped,
            _ => Memory::Device,
        };
        let device = self.devices.of_arena(owner, home).clone();
        let desc = BufferDesc { size, memory, exportable: home != Home::Device };
        let buffer = device.create_buffer(&desc)?;
        self.buffers.insert((owner, home), buffer);
        for actor in (0..self.devices.actors()).filter(|actor| self.devices.reaches(*actor, owner, home, links)) {
            let importer = self.devices.of(actor).clone();
            if importer.info().id == buffer.device {
                continue;
            }
            let view = share(&device, buffer, &importer, home, &mut self.refused)?;
            self.views.insert((owner, home, actor), view);
            if let Some(trace) = trace {
                trace.alias(view, buffer);
            }
        }
        Ok(())
    }
    fn holds(&self, needs: &Needs) -> bool {
        needs.iter().all(|(arena, bytes)| self.sizes.get(arena).is_some_and(|have| have >= bytes))
    }
    fn next_turn(self: Arc<Self>) -> Turn {
        let (bank, after) = {
            let turns = self.lock();
            let bank = turns.next % self.banks;
            (bank, turns.last[bank as usize].clone())
        };
        Turn { pool: self, bank, after }
    }
    /// Bytes `start..start + size` of an arena in a bank, as `actor` calls them.
    pub fn range(&self, bank: u64, arena: (Actor, Home), actor: Actor, start: u64, size: u64) -> Range {
        let (owner, home) = allocation(arena);
        let view = self.views.get(&(owner, home, actor)).unwrap_or_else(|| &self.buffers[&(owner, home)]);
        Range::new(*view, self.starts[&arena] + bank * self.sizes[&arena] + start, size)
    }
    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for ((.., actor), view) in &self.views {
            self.devices.of(*actor).destroy_buffer(*view);
        }
        for (&(owner, home), buffer) in &self.buffers {
            self.devices.of_arena(owner, home).destroy_buffer(*buffer);
        }
    }
}

/// Whose buffer an arena lies in. Shared memory is one buffer: a kernel that reads every rank's outbox then binds one.
fn allocation((owner, home): (Actor, Home)) -> (Actor, Home) {
    if home == Home::Shared { (0, home) } else { (owner, home) }
}

/// Gives `importer` a view of a buffer, in the first form that both have. An inbox is device memory, and crosses as
/// such even where the host could see it. `refused` gets the forms that were tried in vain.
fn share(
    device: &Arc<dyn Device>,
    buffer: BufferId,
    importer: &Arc<dyn Device>,
    home: Home,
    refused: &mut Vec<String>,
) -> Result<BufferId> {
    let (out, into) = (&device.limits().memory_export, &importer.limits().memory_import);
    let mut refusal = contract::Error::Unsupported {
        device: importer.info().id,
        what: "form of memory that it shares with the owner",
        instead: "take the copied path",
    };
    let mut kinds = [SharedKind::Host, SharedKind::DmaBuf, SharedKind::OpaqueFd];
    kinds.rotate_left(usize::from(home == Home::Inbox));
    for kind in kinds {
        if out.contains(&kind) && into.contains(&kind) {
            match device.export(buffer, kind).and_then(|shared| importer.import(&shared)) {
                Ok(view) => return Ok(view),
                Err(error) => {
                    let why = format!("{kind:?} from {} to {}: {error}", device.info().id, importer.info().id);
                    log::warn!("{why}");
                    refused.push(why);
                    refusal = error;
                }
            }
        }
    }
    Err(refusal.into())
}

/// Who else touches memory of this kind, for the acquires and releases of its owner.
pub(crate) fn domain(home: Home) -> Domain {
    if home == Home::Inbox { Domain::Foreign } else { Domain::Host }
}

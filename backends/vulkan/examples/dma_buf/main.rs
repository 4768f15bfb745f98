//! What real dma-bufs do between the Vulkan devices of this machine.
//!
//! Each device exports to every other one, and each exporter that the kernel has besides (udmabuf, the system heap, vgem)
//! to all of them. Patterns cross both ways and are read back, by the host too where it may map the memory. A line tells who
//! exported, who imported and what the kernel says of the descriptor: drivers also take what is no dma-buf, so an
//! import that succeeds is not worth a line. Exit code 1 if anything came across wrong.

mod exporters;

use allhands_contract::{
    BufferDesc, BufferId, Device, DeviceId, Domain, Memory, Op, Point, Range, SharedFd, SharedHandle, SharedKind,
    SharedMemory, Submission, Waited,
};
use allhands_vulkan::{Selector, VulkanDevice, adapters};
use std::{
    error::Error,
    os::fd::{AsFd, OwnedFd},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant},
};

/// More than a page, and a multiple of what any exporter asks for.
const SIZE: u64 = 256 << 10;
type Outcome<T> = Result<T, Box<dyn Error>>;

/// A device, and what to call it.
struct Peer {
    name: String,
    device: Arc<VulkanDevice>,
}

fn main() -> ExitCode {
    let mut failed = 0;
    let mut told = |who: String, outcome: Outcome<String>| match outcome {
        Ok(line) => println!("{line}"),
        Err(why) => {
            failed += 1;
            println!("FAILED: {who}: {why}");
        }
    };
    let mut peers = Vec::new();
    for adapter in adapters() {
        let name = format!("{} [vulkan:{}]", adapter.driver, adapter.index);
        match VulkanDevice::open(&Selector::Index(adapter.index)) {
            Ok(device) => peers.push(Peer { name, device }),
            Err(why) => told(name, Err(why.into())),
        }
    }
    for (i, from) in peers.iter().enumerate() {
        for to in peers.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, to)| to) {
            told(format!("{} to {}", from.name, to.name), between(from, to));
        }
    }
    for exporter in exporters::ALL {
        told(exporter.name.into(), foreign(exporter, &peers));
    }
    for peer in &peers {
        told(peer.name.clone(), no_dma_buf(peer));
    }
    println!("{} devices, {failed} failures", peers.len());
    if failed == 0 && !peers.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

impl Peer {
    fn exports(&self) -> bool {
        self.device.limits().memory_export.contains(&SharedKind::DmaBuf)
    }
    fn imports(&self) -> bool {
        self.device.limits().memory_import.contains(&SharedKind::DmaBuf)
    }
    fn local(&self, memory: Memory, exportable: bool) -> Outcome<BufferId> {
        Ok(self.device.create_buffer(&BufferDesc { size: SIZE, memory, exportable })?)
    }
    /// Has the queue copy `bytes` into memory that others read next.
    fn put(&self, shared: BufferId, bytes: &[u8]) -> Outcome<()> {
        let own = self.local(Memory::Device, false)?;
        self.device.write(whole(own), bytes)?;
        let (src, dst) = (whole(own), whole(shared));
        let copy = [Op::Copy { src, dst }, Op::Barrier, Op::Release { range: dst, to: Domain::Foreign }];
        self.run(&copy)?;
        self.device.destroy_buffer(own);
        Ok(())
    }
    /// Has the queue read what others wrote.
    fn get(&self, shared: BufferId) -> Outcome<Vec<u8>> {
        let own = self.local(Memory::Device, false)?;
        let (src, dst) = (whole(shared), whole(own));
        self.run(&[Op::Acquire { range: src, from: Domain::Foreign }, Op::Barrier, Op::Copy { src, dst }])?;
        let mut bytes = vec![0; SIZE as usize];
        self.device.read(whole(own), &mut bytes)?;
        self.device.destroy_buffer(own);
        Ok(bytes)
    }
    fn run(&self, ops: &[Op]) -> Outcome<()> {
        let device = &self.device;
        let signal = Point { timeline: device.create_timeline(false)?, value: 1 };
        let commands = device.prepare(ops)?;
        device.submit(&[Submission { commands: Some(commands), waits: &[], signal }])?;
        let deadline = Instant::now() + Duration::from_secs(60);
        if device.wait_any(&[signal], device.wakes(), deadline)? != Waited::Reached {
            return Err("its queue did not finish in a minute".into());
        }
        device.destroy_commands(commands);
        device.destroy_timeline(signal.timeline);
        Ok(())
    }
}

/// A dma-buf of `from`'s memory, imported by `to`: each writes what the other reads.
fn between(from: &Peer, to: &Peer) -> Outcome<String> {
    if !from.exports() {
        return Ok(format!("refused: {} exports no dma-bufs, so {} gets none of it", from.name, to.name));
    }
    if !to.imports() {
        return Ok(format!("refused: {} imports no dma-bufs, so none of {}", to.name, from.name));
    }
    let buffer = from.local(Memory::Device, true)?;
    let shared = from.device.export(buffer, SharedKind::DmaBuf)?;
    let SharedHandle::DmaBuf(fd) = &shared.handle else { return Err("it exported something else".into()) };
    let exporter = exporters::exporter_of(fd.fd.as_fd())?;
    let view = to.device.import(&shared)?;
    from.put(buffer, &pattern(1))?;
    same(&to.get(view)?, &pattern(1), "the importer reads what the exporter wrote")?;
    to.put(view, &pattern(2))?;
    same(&from.get(buffer)?, &pattern(2), "the exporter reads what the importer wrote")?;
    // The importer's view outlives the exporter's buffer.
    from.device.destroy_buffer(buffer);
    same(&to.get(view)?, &pattern(2), "the importer reads after the exporter has let go")?;
    to.device.destroy_buffer(view);
    Ok(format!("ok: dma-buf of `{exporter}`, exported by {}, imported by {}: both ways", from.name, to.name))
}

/// A dma-buf that no Vulkan device made, imported by all that import any.
fn foreign(exporter: &exporters::Exporter, peers: &[Peer]) -> Outcome<String> {
    let fd = match (exporter.make)(SIZE) {
        Ok(fd) => fd,
        Err(why) => return Ok(format!("absent: {}: {why}", exporter.name)),
    };
    let exported_by = exporters::exporter_of(fd.as_fd())?;
    let importers: Vec<_> = peers.iter().filter(|peer| peer.imports()).collect();
    let shared = foreign_memory(fd);
    let SharedHandle::DmaBuf(handle) = &shared.handle else { return Err("it is made above".into()) };
    let views: Vec<_> = importers.iter().map(|to| to.device.import(&shared)).collect::<Result<_, _>>()?;
    for (seed, (writer, view)) in (10..).zip(importers.iter().zip(&views)) {
        writer.put(*view, &pattern(seed))?;
        for (reader, view) in importers.iter().zip(&views) {
            same(&reader.get(*view)?, &pattern(seed), &format!("{} reads what {} wrote", reader.name, writer.name))?;
        }
        same(&exporters::host_view(handle.fd.as_fd(), SIZE)?, &pattern(seed), "the host reads what a device wrote")?;
    }
    let names: Vec<_> = importers.iter().map(|to| to.name.as_str()).collect();
    let names = names.join(" and ");
    Ok(format!(
        "ok: dma-buf of `{exported_by}`, exported by {}, imported by {names}: both ways, host too",
        exporter.name
    ))
}

/// What is no dma-buf is refused, whatever the driver would take.
fn no_dma_buf(to: &Peer) -> Outcome<String> {
    if !to.imports() {
        return Ok(format!("refused: {} imports no dma-bufs, so no memfd either", to.name));
    }
    match to.device.import(&foreign_memory(exporters::memfd(SIZE)?)) {
        Err(why) => Ok(format!("refused: {}: {why}", to.name)),
        Ok(_) => Err("it took a memfd for a dma-buf".into()),
    }
}

fn foreign_memory(fd: OwnedFd) -> SharedMemory {
    let fd = SharedFd {
        fd: Arc::new(fd),
        allocation_size: SIZE,
        offset: 0,
        memory_type: 0,
        dedicated: false,
        device_uuid: [0; 16],
        driver_uuid: [0; 16],
    };
    SharedMemory { from: DeviceId::unique(), size: SIZE, handle: SharedHandle::DmaBuf(fd) }
}

fn whole(buffer: BufferId) -> Range {
    Range::new(buffer, 0, SIZE)
}

/// Bytes that depend on where they are and on `seed`, and are never zero.
fn pattern(seed: u64) -> Vec<u8> {
    (0..SIZE).map(|i| (i.wrapping_mul(0x9e37_79b1) >> 8 ^ i ^ seed.wrapping_mul(0x1f)) as u8 | 1).collect()
}

fn same(got: &[u8], want: &[u8], what: &str) -> Outcome<()> {
    match got.iter().zip(want).position(|(got, want)| got != want) {
        None => Ok(()),
        Some(i) => Err(format!("{what}: byte {i} is {:#04x} and was {:#04x}", got[i], want[i]).into()),
    }
}

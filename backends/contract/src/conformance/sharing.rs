//! Memory that the host and several devices reach at once, through pointers that no call sees.
use super::{
    Outcome, Test,
    gates::{Gate, unreached},
    rig::*,
    table,
};
use crate::*;
use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    ptr::NonNull,
    sync::Arc,
};

pub(super) const TESTS: &[Test] = table![
    the_device_sees_what_the_host_wrote,
    the_host_sees_what_the_device_wrote,
    the_device_sees_what_the_host_wrote_before_a_gate,
    exported_memory_outlives_its_buffer,
    host_pages_can_be_imported,
    devices_share_exported_memory,
];

const SIZE: usize = 8192;

/// A buffer and the pages behind it.
fn exported(rig: &Rig, memory: Memory) -> Check<(BufferId, SharedMemory)> {
    let desc = BufferDesc { size: SIZE as u64, memory, exportable: true };
    let buffer = rig.keep(said("create_buffer, exportable", rig.device.create_buffer(&desc))?);
    let shared = said("export", rig.device.export(buffer, SharedKind::Host))?;
    ensure(shared.from == rig.device.info().id, || format!("exported memory is of {}", rig.device.info().id))?;
    ensure(shared.size >= SIZE as u64, || format!("{} bytes were exported of {SIZE}", shared.size))?;
    Ok((buffer, shared))
}

fn exports(device: &Arc<dyn Device>) -> bool {
    device.limits().memory_export.contains(&SharedKind::Host)
}

fn region(shared: &SharedMemory) -> &HostRegion {
    shared.region().expect("the tests here export and import host pages only")
}

fn put(shared: &SharedMemory, bytes: &[u8]) {
    assert!(bytes.len() <= region(shared).len());
    // SAFETY: the region has that many bytes and is mapped while `shared` is; every test here touches it only while
    // no submission that has started and not completed uses it.
    unsafe { region(shared).as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
}

fn get(shared: &SharedMemory, size: usize) -> Vec<u8> {
    assert!(size <= region(shared).len());
    let mut bytes = vec![0; size];
    // SAFETY: as in `put`.
    unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(region(shared).as_ptr(), size) }
    bytes
}

/// Pages of the suite's own, aligned for any device.
fn pages(device: &Arc<dyn Device>) -> Check<SharedMemory> {
    struct Pages(NonNull<u8>, Layout);
    // SAFETY: it owns the allocation and gives no access to it.
    unsafe impl Send for Pages {}
    // SAFETY: as above.
    unsafe impl Sync for Pages {}
    impl Drop for Pages {
        fn drop(&mut self) {
            // SAFETY: it was allocated with this layout.
            unsafe { dealloc(self.0.as_ptr(), self.1) }
        }
    }
    let layout = Layout::from_size_align(1 << 16, 1 << 16).map_err(|e| e.to_string())?;
    // SAFETY: the layout is not of size zero.
    let start = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or("no memory for pages")?;
    // SAFETY: the bytes stay until the owner is dropped, and no reference to them is ever made.
    let region = unsafe { HostRegion::new(start, layout.size(), Box::new(Pages(start, layout))) };
    Ok(SharedMemory::host(device.info().id, Arc::new(region)))
}

/// The kinds of memory that the device copies from or to, and the host reaches.
fn host_kinds(device: &Arc<dyn Device>, one_way: Memory) -> Vec<Memory> {
    std::iter::once(one_way).chain(device.limits().mapped.then_some(Memory::Mapped)).collect()
}

fn the_device_sees_what_the_host_wrote(device: &Arc<dyn Device>) -> Outcome {
    if !exports(device) {
        return not_applicable("it exports no host pages");
    }
    let rig = Rig::new(device)?;
    for memory in host_kinds(device, Memory::Upload) {
        let (src, shared) = exported(&rig, memory)?;
        let dst = rig.holding(&pattern(1, SIZE))?;
        for round in 2..5 {
            let content = pattern(round, SIZE);
            let commands = rig.prepare(&[copy(src, 0, dst, 0, SIZE as u64)])?;
            put(&shared, &content); // after the commands were made
            let point = rig.next();
            rig.submit(Some(commands), &[], point)?;
            rig.wait(point)?;
            rig.holds(&format!("what the host wrote to {memory:?} memory"), dst, &content)?;
            rig.holds("a read of what the host wrote", src, &content)?;
            device.destroy_commands(commands);
        }
    }
    passed()
}

fn the_host_sees_what_the_device_wrote(device: &Arc<dyn Device>) -> Outcome {
    if !exports(device) {
        return not_applicable("it exports no host pages");
    }
    let rig = Rig::new(device)?;
    for memory in host_kinds(device, Memory::Download) {
        let (dst, shared) = exported(&rig, memory)?;
        for round in 1..4 {
            let content = pattern(round, SIZE);
            let src = rig.holding(&content)?;
            put(&shared, &pattern(99, SIZE));
            rig.run(&[copy(src, 0, dst, 0, SIZE as u64)])?;
            same(&format!("what the host reads of {memory:?} memory"), &get(&shared, SIZE), &content)?;
            rig.write(dst, &pattern(7, SIZE))?;
            same("what the host reads of a write", &get(&shared, SIZE), &pattern(7, SIZE))?;
        }
    }
    passed()
}

fn the_device_sees_what_the_host_wrote_before_a_gate(device: &Arc<dyn Device>) -> Outcome {
    if !exports(device) || !device.limits().gated {
        return not_applicable("it exports no host pages, or is not gated");
    }
    let rig = Rig::new(device)?;
    let gate = Gate::new(&rig)?;
    for (i, memory) in host_kinds(device, Memory::Upload).into_iter().enumerate() {
        let (src, shared) = exported(&rig, memory)?;
        let dst = rig.holding(&pattern(1, SIZE))?;
        put(&shared, &pattern(2, SIZE));
        let commands = rig.prepare(&[copy(src, 0, dst, 0, SIZE as u64)])?;
        let (point, open) = (rig.next(), i as u64 + 1);
        rig.submit(Some(commands), &[gate.at(open)], point)?;
        unreached(device, "a submission whose gate is shut", point)?;
        put(&shared, &pattern(3, SIZE)); // after the submit, before it starts
        gate.open(open)?;
        rig.wait(point)?;
        rig.holds("what the host wrote before it opened the gate", dst, &pattern(3, SIZE))?;
        device.destroy_commands(commands);
    }
    passed()
}

fn exported_memory_outlives_its_buffer(device: &Arc<dyn Device>) -> Outcome {
    if !exports(device) {
        return not_applicable("it exports no host pages");
    }
    let rig = Rig::new(device)?;
    let (buffer, shared) = exported(&rig, Memory::Upload)?;
    let content = pattern(1, SIZE);
    put(&shared, &content);
    device.destroy_buffer(buffer);
    (0..4).try_for_each(|i| rig.holding(&pattern(10 + i, SIZE)).map(|_| ()))?;
    same("pages whose buffer was destroyed", &get(&shared, SIZE), &content)?;
    passed()
}

/// Copies into and out of `imported`, whose pages are `shared`.
fn round_trip(rig: &Rig, imported: BufferId, shared: &SharedMemory) -> Check {
    let size = said("size of an import", rig.device.size(imported))?;
    ensure(size == shared.size, || format!("an import of {} bytes has {size}", shared.size))?;
    for round in 1..4 {
        let (a, b) = (pattern(round, SIZE), pattern(100 + round, SIZE));
        let (src, dst) = (rig.holding(&b)?, rig.holding(&pattern(50, SIZE))?);
        put(shared, &a);
        rig.run(&[copy(imported, 0, dst, 0, SIZE as u64), Op::Barrier, copy(src, 0, imported, 0, SIZE as u64)])?;
        rig.holds("a copy out of imported pages", dst, &a)?;
        same("a copy into imported pages", &get(shared, SIZE), &b)?;
    }
    Ok(())
}

fn host_pages_can_be_imported(device: &Arc<dyn Device>) -> Outcome {
    if !device.limits().memory_import.contains(&SharedKind::Host) {
        return not_applicable("it imports no host pages");
    }
    let rig = Rig::new(device)?;
    let shared = pages(device)?;
    // Twice: one allocation may be imported more than once.
    for _ in 0..2 {
        let imported = rig.keep(said("import", device.import(&shared))?);
        round_trip(&rig, imported, &shared)?;
    }
    passed()
}

fn devices_share_exported_memory(device: &Arc<dyn Device>) -> Outcome {
    let other = said("sibling", device.sibling())?;
    if !exports(&other) || !device.limits().memory_import.contains(&SharedKind::Host) {
        return not_applicable("it exports or imports no host pages");
    }
    let (rig, far) = (Rig::new(device)?, Rig::new(&other)?);
    let (theirs, shared) = exported(&far, Memory::Upload)?;
    let ours = rig.keep(said("import", device.import(&shared))?);
    ensure(ours.device == device.info().id, || "an import is a buffer of the importer".into())?;
    round_trip(&rig, ours, &shared)?;
    // What one device writes the other reads.
    let (src, dst) = (rig.holding(&pattern(1, SIZE))?, far.holding(&pattern(2, SIZE))?);
    rig.run(&[copy(src, 0, ours, 0, SIZE as u64)])?;
    far.run(&[copy(theirs, 0, dst, 0, SIZE as u64)])?;
    far.holds("what another device wrote", dst, &pattern(1, SIZE))?;
    // The exporter may go first.
    drop(far);
    drop(other);
    round_trip(&rig, ours, &shared)?;
    passed()
}

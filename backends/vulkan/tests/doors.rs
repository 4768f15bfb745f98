//! Every call that may fail on some driver, made to fail: it is an error with its reason, nothing is left behind, and
//! the device goes on.
use allhands_contract::*;
use allhands_vulkan::{Door, Fault, VulkanDevice, ash::vk};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

mod common;
use common::*;

const SIZE: usize = 8192;

/// A thing to do that goes through a door, or `None` where the device lacks it.
fn attempt(device: &VulkanDevice, door: Door) -> Option<Result<()>> {
    let limits = device.limits();
    let fd = [SharedKind::DmaBuf, SharedKind::OpaqueFd].into_iter().find(|k| limits.memory_export.contains(k));
    let create = |memory, exportable| device.create_buffer(&BufferDesc { size: SIZE as u64, memory, exportable });
    let done = |id: BufferId| device.destroy_buffer(id);
    Some(match door {
        Door::BufferCreate => create(Memory::Device, false).map(done),
        Door::Export => {
            let ours = buffer(device, SIZE, if fd.is_some() { Memory::Device } else { Memory::Upload }, true);
            let exported = device.export(ours, fd.unwrap_or(SharedKind::Host)).map(drop);
            done(ours);
            exported
        }
        Door::Import => {
            let kinds = [SharedKind::OpaqueFd, SharedKind::Host];
            let kind =
                kinds.into_iter().find(|k| limits.memory_import.contains(k) && limits.memory_export.contains(k))?;
            let ours =
                buffer(device, SIZE, if kind == SharedKind::Host { Memory::Upload } else { Memory::Device }, true);
            let imported = device.import(&device.export(ours, kind).unwrap()).map(done);
            done(ours);
            imported
        }
        Door::TimelineCreate => device.create_timeline(false).map(|t| device.destroy_timeline(t)),
        Door::TimelineExport | Door::TimelineImport => {
            if !limits.timeline_export || !limits.timeline_import {
                return None;
            }
            let ours = device.create_timeline(true).unwrap();
            let shared = device.export_timeline(ours);
            device.destroy_timeline(ours);
            match shared {
                Ok(shared) if door == Door::TimelineImport => {
                    device.import_timeline(&shared).map(|t| device.destroy_timeline(t))
                }
                shared => shared.map(drop),
            }
        }
        Door::Submit | Door::Wait => {
            // Opened for what the other one needs.
            let timeline = device.create_timeline(false).unwrap();
            let point = Point { timeline, value: 1 };
            let submitted = device.submit(&[Submission { commands: None, waits: &[], signal: point }]);
            let deadline = Instant::now() + Duration::from_secs(60);
            let waited = submitted.and_then(|()| device.wait_any(&[point], device.wakes(), deadline).map(|_| ()));
            device.destroy_timeline(timeline);
            waited
        }
    })
}

const DOORS: [Door; 8] = [
    Door::BufferCreate,
    Door::Export,
    Door::Import,
    Door::TimelineCreate,
    Door::TimelineExport,
    Door::TimelineImport,
    Door::Submit,
    Door::Wait,
];

#[test]
fn each_failure_is_an_error_and_leaves_nothing_behind() {
    with_devices(|device| {
        let faults: [(vk::Result, fn(&Error) -> bool); 3] = [
            (vk::Result::ERROR_OUT_OF_DEVICE_MEMORY, |e| matches!(e, Error::OutOfMemory { .. })),
            (vk::Result::ERROR_INVALID_EXTERNAL_HANDLE, |e| matches!(e, Error::Refused { .. })),
            (vk::Result::ERROR_UNKNOWN, |e| matches!(e, Error::Refused { why, .. } if why.contains("UNKNOWN"))),
        ];
        for door in DOORS {
            let Some(right) = attempt(&device, door) else {
                println!("  {door:?}: not asked, it lacks it");
                continue;
            };
            assert_eq!(right, Ok(()), "{door:?} before it is shut");
            let mut flat = None;
            for i in 0..200 {
                let (why, is_right) = faults[i % faults.len()];
                device.doors().shut(door, Fault::Fail(why));
                let failed = attempt(&device, door);
                assert!(matches!(&failed, Some(Err(e)) if is_right(e)), "{door:?} with {why:?} gave {failed:?}");
                device.doors().open(door);
                if i == 20 || i == 199 {
                    // Everything under way lands first.
                    assert_eq!(attempt(&device, Door::Wait), Some(Ok(())));
                    let now = (descriptors(), device.counters().allocated);
                    assert_eq!(*flat.get_or_insert(now), now, "{door:?}: descriptors and bytes stay what they were");
                }
            }
            assert_eq!(attempt(&device, door), Some(Ok(())), "{door:?} after it was opened");
        }
    });
}

#[test]
fn a_loss_is_kept_and_ends_everything() {
    with_devices(|device| {
        let kept = buffer(&*device, SIZE, Memory::Device, false);
        let timeline = device.create_timeline(false).unwrap();
        let commands = device.prepare(&[]).unwrap();
        device.doors().shut(Door::Submit, Fault::Fail(vk::Result::ERROR_DEVICE_LOST));
        let lost = attempt(&device, Door::Submit).unwrap().unwrap_err();
        assert!(matches!(lost, Error::Lost { .. }), "{lost}");
        device.doors().open(Door::Submit);
        let point = Point { timeline, value: 1 };
        let after = [
            device.status(),
            device.read(whole_of(kept), &mut [0; SIZE]),
            device.write(whole_of(kept), &[0; SIZE]),
            device.submit(&[Submission { commands: Some(commands), waits: &[], signal: point }]),
            device.wait_any(&[point], device.wakes(), Instant::now()).map(|_| ()),
            device.signal(point),
            device.prepare(&[]).map(|_| ()),
            device.value(timeline).map(|_| ()),
            device.create_timeline(false).map(|_| ()),
            device.create_buffer(&BufferDesc { size: 4, memory: Memory::Upload, exportable: false }).map(|_| ()),
        ];
        for (i, result) in after.into_iter().enumerate() {
            assert_eq!(result, Err(lost.clone()), "call {i}");
        }
        device.sibling().unwrap().status().unwrap();
    });
}

fn whole_of(buffer: BufferId) -> Range {
    Range::new(buffer, 0, SIZE as u64)
}

#[test]
fn an_import_that_lies_has_other_bytes() {
    with_devices(|device| {
        let kinds = [SharedKind::OpaqueFd, SharedKind::Host];
        let limits = device.limits();
        for kind in kinds.into_iter().filter(|k| limits.memory_import.contains(k) && limits.memory_export.contains(k)) {
            let memory = if kind == SharedKind::Host { Memory::Upload } else { Memory::Device };
            let ours = buffer(&*device, SIZE, memory, true);
            device.write(whole_of(ours), &pattern(1, SIZE)).unwrap();
            let shared = device.export(ours, kind).unwrap();
            device.doors().shut(Door::Import, Fault::Lie);
            let lie = device.import(&shared).unwrap();
            device.doors().open(Door::Import);
            let truth = device.import(&shared).unwrap();
            assert_eq!(device.size(lie), device.size(truth));
            device.write(whole_of(lie), &pattern(2, SIZE)).unwrap();
            assert!(read(&*device, truth) == pattern(1, SIZE), "{kind:?}: the truth is not written through the lie");
            device.write(whole_of(truth), &pattern(3, SIZE)).unwrap();
            assert!(read(&*device, lie) == pattern(2, SIZE), "{kind:?}: the lie does not show the truth");
        }
    });
}

#[test]
fn a_stalled_call_goes_on_once_its_door_is_open() {
    with_devices(|device| {
        let device: Arc<VulkanDevice> = device;
        for door in [Door::Submit, Door::Wait, Door::BufferCreate] {
            device.doors().shut(door, Fault::Stall);
            std::thread::scope(|scope| {
                let stalled = scope.spawn(|| attempt(&device, door));
                // What does not go through it is not held up.
                assert_eq!(attempt(&device, Door::TimelineCreate), Some(Ok(())));
                assert!(!stalled.is_finished());
                device.doors().open(door);
                assert_eq!(stalled.join().unwrap(), Some(Ok(())));
            });
        }
    });
}

#[test]
fn doors_are_a_siblings_too() {
    with_devices(|device| {
        let sibling = device.sibling().unwrap();
        device.doors().shut(Door::TimelineCreate, Fault::Fail(vk::Result::ERROR_UNKNOWN));
        assert!(matches!(sibling.create_timeline(false), Err(Error::Refused { .. })));
        device.doors().open(Door::TimelineCreate);
        assert!(sibling.create_timeline(false).is_ok());
    });
}

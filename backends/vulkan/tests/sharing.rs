//! Memory between devices: each way out and in, between two devices of one physical device and between those of
//! different drivers, with what must not be taken refused.
use allhands_contract::*;
use allhands_vulkan::VulkanDevice;
use std::{
    fs::File,
    io::{Read, Seek, Write},
    os::fd::OwnedFd,
    sync::Arc,
};

mod common;
use common::*;

const SIZE: usize = 20_480;

fn copy(src: Range, dst: Range) -> Op {
    Op::Copy { src, dst }
}

/// Has each of two devices write what the other reads, through memory that both have.
fn both_ways(devices: [&dyn Device; 2], views: [BufferId; 2], domain: Domain) {
    for round in 0..3 {
        for (writer, reader) in [(0, 1), (1, 0)] {
            let content = pattern(10 * round + writer as u64, SIZE);
            let (from, to) = (devices[writer], devices[reader]);
            let src = buffer(from, SIZE, Memory::Device, false);
            from.write(whole(from, src), &content).unwrap();
            let shared = Range::new(views[writer], 0, SIZE as u64);
            run(
                from,
                &[
                    Op::Acquire { range: shared, from: domain },
                    copy(whole(from, src), shared),
                    Op::Release { range: shared, to: domain },
                ],
            );
            let dst = buffer(to, SIZE, Memory::Device, false);
            to.write(whole(to, dst), &pattern(99, SIZE)).unwrap();
            let shared = Range::new(views[reader], 0, SIZE as u64);
            run(
                to,
                &[
                    Op::Acquire { range: shared, from: domain },
                    copy(shared, whole(to, dst)),
                    Op::Release { range: shared, to: domain },
                ],
            );
            assert!(read(to, dst) == content, "round {round}: what {writer} wrote is not what {reader} read");
            from.destroy_buffer(src);
            to.destroy_buffer(dst);
        }
    }
}

/// Both fds' forms, from a device to its sibling.
fn descriptors_cross(device: &VulkanDevice, kind: SharedKind, memory: Memory) {
    let sibling = device.sibling().unwrap();
    let before = descriptors();
    for _ in 0..3 {
        let ours = buffer(device, SIZE, memory, true);
        let shared = match device.export(ours, kind) {
            Err(Error::Refused { why, .. }) if memory == Memory::Mapped => {
                assert!(why.contains("leaves as host pages"), "{why}");
                mapping_leaves(device, ours);
                return device.destroy_buffer(ours);
            }
            shared => shared.unwrap(),
        };
        assert_eq!((shared.kind(), shared.size, shared.from), (kind, SIZE as u64, device.info().id));
        let theirs = sibling.import(&shared).unwrap();
        assert_eq!(sibling.size(theirs), Ok(SIZE as u64));
        both_ways([device, &*sibling], [ours, theirs], Domain::External);
        // It outlives the exporter's buffer and the descriptor, and a descriptor serves more than once.
        let again = sibling.import(&shared).unwrap();
        device.destroy_buffer(ours);
        drop(shared);
        both_ways([&*sibling, &*sibling], [theirs, again], Domain::External);
        sibling.destroy_buffer(theirs);
        sibling.destroy_buffer(again);
    }
    drop(sibling);
    assert!(descriptors() <= before, "{} descriptors were open and {} are", before, descriptors());
}

/// Mapped memory leaves as what the host sees of it, wherever it leaves as nothing else.
fn mapping_leaves(device: &VulkanDevice, ours: BufferId) {
    let shared = device.export(ours, SharedKind::Host).unwrap();
    let region = shared.region().expect("it was asked for as one");
    assert_eq!(region.len(), SIZE);
    let src = buffer(device, SIZE, Memory::Device, false);
    device.write(whole(device, src), &pattern(7, SIZE)).unwrap();
    let release = Op::Release { range: whole(device, ours), to: Domain::Host };
    run(device, &[copy(whole(device, src), whole(device, ours)), release]);
    let mut seen = vec![0; SIZE];
    // SAFETY: the region is as long, and the device has released it to the host.
    unsafe { std::ptr::copy_nonoverlapping(region.as_ptr(), seen.as_mut_ptr(), SIZE) };
    assert!(seen == pattern(7, SIZE), "the host sees what the device wrote");
    device.destroy_buffer(src);
}

#[test]
fn mapped_memory_leaves_as_its_mapping() {
    with_devices(|device| {
        if device.limits().mapped {
            let ours = buffer(&*device, SIZE, Memory::Mapped, true);
            mapping_leaves(&device, ours);
            device.destroy_buffer(ours);
        }
    });
}

#[test]
fn descriptors_carry_memory_to_a_sibling() {
    with_devices(|device| {
        let limits = device.limits();
        let kinds: Vec<SharedKind> = [SharedKind::OpaqueFd, SharedKind::DmaBuf]
            .into_iter()
            .filter(|k| limits.memory_export.contains(k) && limits.memory_import.contains(k))
            .collect();
        println!("  {kinds:?}");
        for kind in kinds {
            descriptors_cross(&device, kind, Memory::Device);
            if limits.mapped {
                descriptors_cross(&device, kind, Memory::Mapped);
            }
        }
    });
}

#[test]
fn host_pages_serve_all_devices() {
    let _alone = alone();
    let devices: Vec<Arc<VulkanDevice>> = selectors().iter().map(open).collect();
    let mut all: Vec<Arc<dyn Device>> = Vec::new();
    for device in devices {
        if device.limits().memory_import.contains(&SharedKind::Host) {
            all.extend([device.sibling().unwrap(), device]);
        }
    }
    for exporter in &all {
        for memory in [Memory::Upload, Memory::Download] {
            let ours = buffer(&**exporter, SIZE, memory, true);
            let shared = exporter.export(ours, SharedKind::Host).unwrap();
            let views: Vec<BufferId> = all.iter().map(|d| d.import(&shared).unwrap()).collect();
            for i in 0..all.len() {
                for j in 0..i {
                    println!("  {} and {}", all[i].info().name, all[j].info().name);
                    both_ways([&*all[i], &*all[j]], [views[i], views[j]], Domain::Foreign);
                }
            }
            exporter.destroy_buffer(ours);
            both_ways([&*all[0], &*all[all.len() - 1]], [views[0], views[all.len() - 1]], Domain::Host);
            all.iter().zip(views).for_each(|(d, view)| d.destroy_buffer(view));
        }
    }
}

/// A memfd in place of a dma-buf, for drivers that take one.
#[test]
fn a_memfd_passes_for_a_dma_buf_where_that_is_allowed() {
    with_devices(|device| {
        if !device.limits().memory_import.contains(&SharedKind::DmaBuf) {
            return println!("  not asked: it imports no dma-bufs");
        }
        let sibling = device.sibling().unwrap();
        let mut file = memfd(SIZE as u64 + 3000);
        let shared = as_dma_buf(&device, file.try_clone().unwrap().into(), SIZE as u64 + 3000);
        let refused = device.import(&shared).unwrap_err();
        assert!(matches!(&refused, Error::Refused { why, .. } if why.contains("memfd (test)")), "{refused}");
        device.doors().accept_memfd_as_dma_buf(true);
        let before = descriptors();
        let views = [device.import(&shared).unwrap(), sibling.import(&shared).unwrap()];
        both_ways([&*device, &*sibling], views, Domain::Foreign);
        device.write(Range::new(views[0], 0, SIZE as u64), &pattern(5, SIZE)).unwrap();
        let mut bytes = vec![0; SIZE];
        file.rewind().unwrap();
        file.read_exact(&mut bytes).unwrap();
        assert!(bytes == pattern(5, SIZE), "the file holds what the device wrote");
        device.destroy_buffer(views[0]);
        sibling.destroy_buffer(views[1]);
        assert_eq!(descriptors(), before);
    });
}

#[test]
fn what_is_no_dma_buf_is_not_taken_for_one() {
    with_devices(|device| {
        if !device.limits().memory_import.contains(&SharedKind::DmaBuf) {
            return println!("  not asked: it imports no dma-bufs");
        }
        device.doors().accept_memfd_as_dma_buf(true);
        let (pipe, _write) = std::io::pipe().unwrap();
        let before = descriptors();
        let cases = [
            (as_dma_buf(&device, pipe.try_clone().unwrap().into(), SIZE as u64), "no dma-buf: pipe:"),
            (as_dma_buf(&device, File::open("/dev/zero").unwrap().into(), SIZE as u64), "no dma-buf: /dev/zero"),
            (as_dma_buf(&device, memfd(4096).into(), SIZE as u64), "has 4096 bytes"),
        ];
        for (shared, want) in cases {
            match device.import(&shared) {
                Err(Error::Refused { why, .. }) => assert!(why.contains(want), "{want}: {why}"),
                other => panic!("{want}: {other:?}"),
            }
        }
        assert_eq!(descriptors(), before);
    });
}

#[test]
fn another_drivers_opaque_descriptor_is_refused() {
    with_devices(|device| {
        if !device.limits().memory_export.contains(&SharedKind::OpaqueFd) {
            return println!("  not asked: it exports no opaque descriptors");
        }
        let ours = buffer(&*device, SIZE, Memory::Device, true);
        let shared = device.export(ours, SharedKind::OpaqueFd).unwrap();
        let SharedHandle::OpaqueFd(fd) = &shared.handle else { panic!("it was asked for as one") };
        let foreign = SharedFd { driver_uuid: [7; 16], ..fd.clone() };
        let nobody = SharedFd { driver_uuid: [0; 16], ..fd.clone() };
        let short = SharedFd { allocation_size: 1 << 40, ..fd.clone() };
        let outside = SharedFd { offset: fd.allocation_size, ..fd.clone() };
        let before = descriptors();
        let mut cases = vec![(foreign, "another driver's"), (nobody, "another driver's"), (outside, "bytes at")];
        // A size that cannot be checked is the driver's word, and a wrong one is nothing that a driver has to stand.
        if rustix::fs::seek(&fd.fd, rustix::fs::SeekFrom::End(0)).is_ok() {
            cases.push((short, "the descriptor has"));
        }
        for (fd, want) in cases {
            match device.import(&SharedMemory { handle: SharedHandle::OpaqueFd(fd), ..shared.clone() }) {
                Err(Error::Refused { why, .. }) => assert!(why.contains(want), "{want}: {why}"),
                other => panic!("{want}: {other:?}"),
            }
        }
        assert_eq!(descriptors(), before);
    });
}

fn memfd(size: u64) -> File {
    let fd = rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let mut file = File::from(fd);
    file.set_len(size).unwrap();
    file.write_all(&[0xaa; 16]).unwrap();
    file
}

fn as_dma_buf(device: &VulkanDevice, fd: OwnedFd, allocation_size: u64) -> SharedMemory {
    let fd = SharedFd {
        fd: Arc::new(fd),
        allocation_size,
        offset: 0,
        memory_type: 0,
        dedicated: false,
        device_uuid: [1; 16],
        driver_uuid: [2; 16],
    };
    SharedMemory { from: device.info().id, size: SIZE as u64, handle: SharedHandle::DmaBuf(fd) }
}

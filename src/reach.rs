//! Memory that the host reaches: where that of every rank's device is the host's own, host workers read and write the
//! callers' buffers themselves ([`direct`](crate::schedule::direct)). Proven on throwaway devices, like a link.
use crate::{
    call::Checked,
    contract::{
        BufferDesc, BufferId, Device, Domain, Memory, Op, Point, Range, Result, SharedKind, SharedMemory, Submission,
    },
    proof::{self, Siblings},
};
use allhands_cpu::{CpuDevice, Mode, Options};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::Arc,
    time::{Duration, Instant},
};

/// Odd words, and more than one page.
const WORDS: u32 = 4_099;
const SIZE: u64 = WORDS as u64 * 4;
/// A proof that takes longer has failed.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether what the device writes arrives at the host, and the other way round; if not, why not.
pub(crate) fn prove(device: &Arc<dyn Device>, siblings: &Siblings) -> std::result::Result<(), String> {
    if !device.limits().unified {
        return Err("its memory is not the host's own".into());
    }
    let (device, own) = (device.clone(), siblings.clone());
    let outcome = proof::apart({
        let device = device.clone();
        move |step| {
            let throwaway = own.of(&device).map_err(|e| e.to_string())?;
            step();
            attempt(&*throwaway).unwrap_or_else(|error| Err(error.to_string()))
        }
    });
    if let Err(why) = &outcome {
        siblings.throw_away(&device);
        log::warn!("{}: host workers keep off its memory: {why}", device.info().id);
    }
    outcome
}

fn attempt(device: &dyn Device) -> Result<std::result::Result<(), String>> {
    let host = CpuDevice::open(Options { mode: Mode::Inline, ..Options::default() })?;
    let desc = BufferDesc { size: SIZE, memory: Memory::Device, exportable: false };
    let [first, seen, last] =
        [device.create_buffer(&desc)?, device.create_buffer(&desc)?, device.create_buffer(&desc)?];
    let timeline = device.create_timeline(false)?;
    let view = host.import(&device.export(seen, SharedKind::Host)?)?;
    let all = |buffer| Range::new(buffer, 0, SIZE);
    let copy = |value: u64, src: BufferId, dst: BufferId| -> Result<()> {
        let ops = [
            Op::Acquire { range: all(src), from: Domain::Host },
            Op::Copy { src: all(src), dst: all(dst) },
            Op::Release { range: all(dst), to: Domain::Host },
        ];
        let (commands, signal) = (Some(device.prepare(&ops)?), Point { timeline, value });
        device.submit(&[Submission { commands, waits: &[], signal }])?;
        let deadline = Instant::now() + PATIENCE;
        while device.value(timeline)? < value && Instant::now() < deadline {
            let _ = device.wait_any(&[signal], device.wakes(), deadline)?;
        }
        commands.iter().for_each(|c| device.destroy_commands(*c));
        Ok(())
    };
    let (there, back) = (pattern(1), pattern(2));
    let (mut at_host, mut at_device) = (vec![0; there.len()], vec![0; there.len()]);
    device.write(all(first), bytemuck::cast_slice(&there))?;
    copy(1, first, seen)?;
    host.read(all(view), bytemuck::cast_slice_mut(&mut at_host))?;
    host.write(all(view), bytemuck::cast_slice(&back))?;
    copy(2, seen, last)?;
    device.read(all(last), bytemuck::cast_slice_mut(&mut at_device))?;
    [first, seen, last].into_iter().for_each(|buffer| device.destroy_buffer(buffer));
    device.destroy_timeline(timeline);
    Ok(match (at_host == there, at_device == back) {
        (true, true) => Ok(()),
        (false, _) => Err("the host does not read what the device wrote".into()),
        (_, false) => Err("the device does not read what the host wrote".into()),
    })
}

fn pattern(seed: u32) -> Vec<u32> {
    (0..WORDS).map(|i| (i ^ seed << 20).wrapping_mul(0x9e37_79b1) | 1).collect()
}

/// The buffers of a call as host workers can import them. An app's own may be refused.
pub(crate) fn export(call: &Checked, devices: &[Arc<dyn Device>]) -> Result<HashMap<BufferId, SharedMemory>> {
    let mut exported = HashMap::new();
    for (rank, device) in call.ranks.iter().zip(devices) {
        for piece in rank.input.pieces.iter().chain(&rank.output.pieces) {
            if let Entry::Vacant(unseen) = exported.entry(piece.buffer) {
                unseen.insert(device.export(piece.buffer, SharedKind::Host)?);
            }
        }
    }
    Ok(exported)
}

//! How much memory a long call takes. Alone in its binary: the peak is the process's.
mod common;

use allhands::{Buffer, DataType, Part, ReduceOp};
use common::{builder, ranks};

const RANKS: usize = 4;
const MIB: u64 = 1 << 20;
const MESSAGE: u64 = 64 * MIB;

/// The peak resident size since the last reset, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}
fn reset_peak() {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
}

/// The peak grows by inputs, outputs and at most twice one message.
#[test]
fn a_long_message_needs_little_more_than_its_buffers() {
    let devices = ranks(RANKS);
    let comm = builder(&devices).build().unwrap();
    let buffers =
        |len: u64| -> Vec<Buffer> { devices.iter().map(|d| Buffer::new(d, DataType::U32, len / 4).unwrap()).collect() };
    let call = |inputs: &[Buffer], outputs: &[Buffer]| {
        let parts = inputs.iter().zip(outputs).map(|(i, o)| Part::new(i.span(), o.span()));
        comm.all_reduce(parts, ReduceOp::Sum).unwrap().wait().unwrap();
    };
    call(&buffers(4096), &buffers(4096));
    let short = comm.staging_bytes();
    reset_peak();
    let baseline = peak();

    let (inputs, outputs) = (buffers(MESSAGE), buffers(MESSAGE));
    let words = |at: u64, rank: u64| (0..MIB / 4).map(|i| common::hash(at + i) ^ rank as u32).collect::<Vec<_>>();
    for (rank, input) in (0..).zip(&inputs) {
        for at in (0..MESSAGE).step_by(MIB as usize) {
            input.write_bytes(at, common::bytes_of(&words(at, rank))).unwrap();
        }
    }
    call(&inputs, &outputs);
    let (growth, staging) = (peak() - baseline, comm.staging_bytes());
    let allowed = 2 * RANKS as u64 * MESSAGE + 2 * MESSAGE;
    println!(
        "peak resident size grew by {} MiB, of which {} MiB are buffers; allowed {} MiB; the pools count {} MiB",
        growth / MIB,
        2 * RANKS as u64 * MESSAGE / MIB,
        allowed / MIB,
        (staging - short) / MIB
    );
    for output in &outputs {
        for at in (0..MESSAGE).step_by(16 * MIB as usize) {
            let mut got = vec![0_u32; (MIB / 4) as usize];
            output.read_bytes(at, bytemuck::cast_slice_mut(&mut got)).unwrap();
            let all: Vec<Vec<u32>> = (0..RANKS as u64).map(|r| words(at, r)).collect();
            let want = (0..got.len()).map(|i| all.iter().fold(0, |sum: u32, v| sum.wrapping_add(v[i])));
            assert_eq!(got.iter().zip(want).position(|(a, b)| *a != b), None);
        }
    }
    assert!(growth <= allowed, "{growth} bytes");
}

//! What the benches share: the devices of `ALLHANDS_DEVICES`, and a Criterion that is quick.
#![allow(dead_code)] // Each bench uses its part.

use allhands::{Buffer, Communicator, Device, devices};
use criterion::Criterion;
use std::{sync::Arc, time::Duration};

/// Few samples: for a look at where time goes, not for a third digit.
pub fn quick() -> Criterion {
    Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(500))
        .configure_from_args()
}

/// The names in `ALLHANDS_DEVICES`, `cpu` if it is unset: each is benched by itself.
pub fn names() -> Vec<String> {
    let list = std::env::var("ALLHANDS_DEVICES").unwrap_or_default();
    let list = if list.is_empty() { "cpu".into() } else { list };
    list.split(',').map(str::to_string).collect()
}

pub fn open(name: &str) -> Arc<dyn Device> {
    devices::open(&name.parse().unwrap()).unwrap_or_else(|e| panic!("{name} must be there: {e}"))
}

/// A communicator of `n` ranks, each on a device of its own, and a buffer for each of `count` ones.
pub fn ranks(name: &str, n: u32, count: u64) -> (Communicator, Vec<Buffer>) {
    let devices: Vec<_> = (0..n).map(|_| open(name)).collect();
    let builder = devices.iter().fold(Communicator::builder(), |b, d| b.rank(d.clone()));
    let fill = |d| Buffer::from_slice(d, &vec![1.0_f32; count as usize]).unwrap();
    let buffers = devices.iter().map(fill).collect();
    (builder.build().unwrap(), buffers)
}

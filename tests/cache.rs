//! Measurements kept on disk: written, read, ignored where they are damaged, and of no effect on the bits.
//!
//! One test, because the directory is named by the environment.
mod common;

use allhands::{Collective, Communicator, DataType, Device, Path, ReduceOp, Shape, contract::Limits};
use allhands_cpu::{CpuDevice, Options};
use common::{Bench, builder, hard_float};
use std::{fs, path::PathBuf, sync::Arc};

fn directory() -> PathBuf {
    PathBuf::from(std::env::var_os("ALLHANDS_CACHE").unwrap())
}

/// A sum of floats at which the order shows, checked against the fold in rank order.
fn sum(comm: &Communicator, count: u64) {
    let devices: Vec<_> = (0..comm.ranks()).map(|r| comm.device(r).clone()).collect();
    let shape = Shape { collective: Collective::AllReduce, ranks: comm.ranks(), count, in_place: false };
    let bench = Bench::new(&devices, &shape, DataType::F32, Some(ReduceOp::Sum), |r, i| hard_float(r, i, 3));
    comm.call(Collective::AllReduce, Some(ReduceOp::Sum), bench.parts()).start().unwrap().wait().unwrap();
    bench.verify().unwrap_or_else(|e| panic!("{count} elements: {e}"));
}

#[test]
fn measurements_are_kept_and_change_no_bits() {
    let directory = {
        let own = std::env::temp_dir().join(format!("allhands-cache-{}", std::process::id()));
        // Run again in a process of its own: the environment of this one is shared.
        if std::env::var_os("ALLHANDS_CACHE_TEST").is_none() {
            let this = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "measurements_are_kept_and_change_no_bits", "--nocapture"])
                .env("ALLHANDS_CACHE_TEST", "1")
                .env("ALLHANDS_CACHE", &own)
                .status()
                .unwrap();
            let _ = fs::remove_dir_all(own);
            assert!(this.success());
            return;
        }
        directory()
    };
    let file = directory.join("measured");
    // Ranks of whose memory the host reaches nothing: else one algorithm is the best whatever the numbers.
    let restrict = Some((|limits| limits.unified = false) as fn(&mut Limits));
    let open = |_| -> Arc<dyn Device> { CpuDevice::open(Options { restrict, ..Options::default() }).unwrap() };
    let devices: Vec<_> = (0..3).map(open).collect();
    let build = || builder(&devices).build().unwrap();

    assert!(!file.exists());
    let first = build();
    let text = fs::read_to_string(&file).unwrap();
    assert!(text.lines().any(|l| l.starts_with("speed\t")) && text.lines().any(|l| l.starts_with("way\t")), "{text}");
    sum(&first, 1_000);

    // Damaged, of another format, or not to be written: measured again, never an error.
    let damaged = [text.replacen("measurements", "ballads", 1), text[..text.len() - 2].to_string(), "\0".into()];
    for damage in &damaged {
        fs::write(&file, damage).unwrap();
        build();
        let again = fs::read_to_string(&file).unwrap();
        assert_eq!(again.lines().next(), text.lines().next());
        assert!(!damaged.contains(&again));
    }
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    build();
    fs::remove_dir(&file).unwrap();

    // Any numbers: other algorithms are taken, and every float has the same bits.
    let mut choices = Vec::new();
    for numbers in [
        ["1e-9", "0e0", "1e15", "1e3"],
        ["1e-1", "1e3", "1e3", "1e15"],
        ["0e0"; 4],
        ["1e-5", "1e308", "1e308", "1e308"],
    ] {
        let speeds = text.lines().map(|line| {
            let mut fields: Vec<&str> = line.split('\t').collect();
            if fields[0] == "speed" {
                fields[3..7].copy_from_slice(&numbers);
            }
            if fields[0] == "way" {
                fields[6] = "999999999999";
            }
            fields.join("\t") + "\n"
        });
        fs::write(&file, speeds.collect::<String>()).unwrap();
        let comm = build();
        assert!(comm.links().iter().all(|l| Path::ALL.contains(&l.path)));
        choices.push(comm.switch_points(&Collective::AllReduce, DataType::F32));
        for count in [1, 1_000, 140_001] {
            sum(&comm, count);
        }
    }
    assert!(choices.iter().any(|c| *c != choices[0]), "the numbers were not read: {choices:?}");
    assert!(choices.iter().flatten().all(|(_, algorithm)| algorithm.in_rank_order()), "{choices:?}");
}

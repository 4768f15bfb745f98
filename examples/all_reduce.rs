//! Every GPU that can be opened adds up one vector: `cargo run --example all_reduce`.
use allhands::{Buffer, Communicator, ReduceOp, devices};

fn main() -> allhands::Result<()> {
    let mut names = devices::found();
    names.resize(2.max(names.len()), devices::DeviceName::Cpu);
    let ranks = names.iter().map(devices::open).collect::<allhands::Result<Vec<_>>>()?;
    for (name, device) in names.iter().zip(&ranks) {
        println!("{name}: {} ({})", device.info().name, device.info().driver);
    }
    let comm = ranks.iter().fold(Communicator::builder(), |b, device| b.rank(device.clone())).build()?;

    let ones = vec![1.0_f32; 1 << 20];
    let data = ranks.iter().map(|d| Buffer::from_slice(d, &ones)).collect::<allhands::Result<Vec<_>>>()?;
    let pending = comm.all_reduce(&data, ReduceOp::Sum)?;
    pending.wait()?;
    for (rank, buffer) in data.iter().enumerate() {
        println!("rank {rank}: every element is {}", buffer.read::<f32>()?[0]);
    }
    println!("{:?}", pending.report());
    Ok(())
}

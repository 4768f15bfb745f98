//! `allhands prove`: whether cards can write into each other's memory.
//!
//! Peer access can hang the host, so each pair is tried in a child process, with a limit on its time. What comes of it
//! is kept for `allhands info`, `perf` and every program that uses the library.
use crate::{
    Failure,
    args::{self, List},
};
use allhands::{
    Communicator, Path,
    contract::Device,
    devices::{self, DeviceName},
    peers::{self, Verdict},
};
use std::{
    io::Read,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

/// Proves peer access between cards, each pair in a child process, and keeps the result.
#[derive(clap::Args, Debug)]
pub struct Prove {
    /// The devices, such as vulkan:0,vulkan:1. Default: every GPU found.
    #[arg(long, value_parser = args::list::<DeviceName>)]
    devices: Option<List<DeviceName>>,
    /// Seconds that a pair may take.
    #[arg(long, default_value_t = 20)]
    limit: u64,
    /// The child's part: proves the two devices named, in this process.
    #[arg(long, hide = true)]
    child: bool,
}

impl Prove {
    pub fn run(&self) -> Result<(), Failure> {
        let names = match &self.devices {
            Some(List(names)) => names.clone(),
            None => devices::found(),
        };
        if names.len() < 2 {
            return Err(Failure::Usage(format!("a pair needs two devices; found {}", names.len())));
        }
        let open = || names.iter().map(devices::open).collect::<allhands::Result<Vec<_>>>();
        if self.child {
            return prove(&open()?);
        }
        let opened = open()?;
        for a in 0..names.len() {
            for b in a + 1..names.len() {
                let verdict = self.in_child(&names[a], &names[b])?;
                let word = match &verdict {
                    Verdict::Proven => "proven",
                    Verdict::Failed(why) => why,
                };
                println!("{} and {}: {word}", names[a], names[b]);
                let kept = peers::keep(&*opened[a], &*opened[b], &verdict);
                kept.map_err(|e| Failure::Run(format!("the verdict could not be kept: {e}")))?;
            }
        }
        Ok(())
    }
    fn in_child(&self, a: &DeviceName, b: &DeviceName) -> Result<Verdict, Failure> {
        let program =
            std::env::current_exe().map_err(|e| Failure::Run(format!("no program to run as a child: {e}")))?;
        let mut child = Command::new(program)
            .args(["prove", "--child", "--devices", &format!("{a},{b}")])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| Failure::Run(format!("no child process: {e}")))?;
        let end = Instant::now() + Duration::from_secs(self.limit);
        loop {
            match child.try_wait() {
                Ok(Some(status)) if status.success() => return Ok(Verdict::Proven),
                Ok(Some(_)) => {
                    let mut said = String::new();
                    let read = child.stderr.take().map(|mut e| e.read_to_string(&mut said));
                    let last = said.lines().last().filter(|_| read.is_some());
                    return Ok(Verdict::Failed(last.unwrap_or("the child ended without a word").into()));
                }
                Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(20)),
                Ok(None) => {
                    // A child that hangs in its driver may not even die: it is not waited for.
                    let _ = child.kill();
                    return Ok(Verdict::Failed(format!("no answer within {} s", self.limit)));
                }
                Err(e) => return Err(Failure::Run(format!("the child was lost: {e}"))),
            }
        }
    }
}

fn prove(devices: &[Arc<dyn Device>]) -> Result<(), Failure> {
    let builder = devices.iter().fold(Communicator::builder(), |b, device| b.rank(device.clone()));
    builder.path(Some(Path::Peer)).build()?;
    Ok(())
}

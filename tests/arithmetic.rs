//! Devices whose kernels break a rule: the self-test names it, and calls are still right, because the host reduces.
mod common;
#[macro_use]
#[path = "common/delegate.rs"]
mod delegate;

use allhands::{
    Collective, DataType, Device, Property, ReduceOp, ReducedOn, Shape,
    contract::{CommandsId, Info, Kernel, Op, Result, Submission},
};
use allhands_cpu::{CpuDevice, Options};
use common::{Bench, builder, hard_float};
use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

/// What is wrong with the kernels of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    AddsBackwards,
    RoundsDown,
    LosesNan,
    LosesNegativeZero,
    FlushesSubnormals,
}

/// A sound device, and what happens to the results of its kernels on f32.
struct Broken {
    inner: Arc<dyn Device>,
    info: Info,
    fault: Fault,
    kernels: Mutex<HashMap<CommandsId, Vec<Kernel>>>,
}

impl Broken {
    fn over(inner: Arc<dyn Device>, fault: Fault) -> Arc<dyn Device> {
        let info = Info { name: format!("{} that {fault:?}", inner.info().name), ..inner.info().clone() };
        Arc::new(Broken { inner, info, fault, kernels: Mutex::default() })
    }
    fn open(fault: Fault) -> Arc<dyn Device> {
        // Without gates a submission is made when it can run, so that what it stored can be waited for.
        let options = Options { restrict: Some(|l| l.gated = false), ..Options::default() };
        Broken::over(CpuDevice::open(options).unwrap(), fault)
    }
    fn spoil(&self, kernel: &Kernel) -> Result<()> {
        for store in &kernel.stores {
            let mut words = vec![0_u32; store.size as usize / 4];
            self.inner.read(*store, bytemuck::cast_slice_mut(&mut words))?;
            let before = words.clone();
            for word in &mut words {
                let (exponent, mantissa) = (*word >> 23 & 0xff, *word & 0x7f_ffff);
                match self.fault {
                    Fault::LosesNan if exponent == 0xff && mantissa != 0 => *word = 0,
                    Fault::LosesNegativeZero if *word == 0x8000_0000 => *word = 0,
                    Fault::FlushesSubnormals if exponent == 0 => *word &= 0x8000_0000,
                    Fault::RoundsDown if (1..0xff).contains(&exponent) && mantissa & 1 == 0 && mantissa > 0 => {
                        *word -= 1;
                    }
                    _ => {}
                }
            }
            if words != before {
                self.inner.write(*store, bytemuck::cast_slice(&words))?;
            }
        }
        Ok(())
    }
}

impl Device for Broken {
    fn submit(&self, submissions: &[Submission<'_>]) -> Result<()> {
        for submission in submissions {
            self.inner.submit(&[*submission])?;
            let kernels = submission.commands.and_then(|c| self.kernels.lock().unwrap().get(&c).cloned());
            for kernel in kernels.iter().flatten().filter(|k| k.dtype == DataType::F32) {
                let far = Instant::now() + Duration::from_secs(60);
                let signal = submission.signal;
                // A communicator's wake ends a wait early.
                while self.inner.value(signal.timeline)? < signal.value {
                    assert!(Instant::now() < far, "the kernel never came to its end");
                    let _ = self.inner.wait_any(&[signal], self.inner.wakes(), far)?;
                }
                self.spoil(kernel)?;
            }
        }
        Ok(())
    }
    fn prepare(&self, ops: &[Op]) -> Result<CommandsId> {
        let mut ops = ops.to_vec();
        let mut kernels = Vec::new();
        for op in &mut ops {
            if let Op::Kernel(kernel) = op {
                if self.fault == Fault::AddsBackwards && kernel.dtype == DataType::F32 {
                    kernel.sources.reverse();
                }
                kernels.push(kernel.clone());
            }
        }
        let commands = self.inner.prepare(&ops)?;
        self.kernels.lock().unwrap().insert(commands, kernels);
        Ok(commands)
    }
    fn sibling(&self) -> Result<Arc<dyn Device>> {
        Ok(Broken::over(self.inner.sibling()?, self.fault))
    }
    fn info(&self) -> &Info {
        &self.info
    }
    delegate!(limits counters status create_buffer destroy_buffer watch size read write export import create_timeline);
    delegate!(destroy_timeline value signal wait_any wakes wake);
    fn destroy_commands(&self, commands: CommandsId) {
        self.kernels.lock().unwrap().remove(&commands);
        self.inner.destroy_commands(commands);
    }
}

#[test]
fn each_broken_rule_is_named_and_calls_are_right() {
    for (fault, property, reduced_on) in [
        (Fault::None, None, ReducedOn::Device),
        (Fault::AddsBackwards, Some(Property::Order), ReducedOn::Host),
        (Fault::RoundsDown, Some(Property::Rounding), ReducedOn::Host),
        (Fault::LosesNan, Some(Property::Nan), ReducedOn::Host),
        (Fault::LosesNegativeZero, Some(Property::SignedZero), ReducedOn::Host),
        (Fault::FlushesSubnormals, Some(Property::SubnormalOutput), ReducedOn::Device),
    ] {
        let devices = [CpuDevice::open(Options::default()).unwrap(), Broken::open(fault), Broken::open(Fault::None)];
        let comm = builder(&devices).build().unwrap();
        let arithmetic = comm.arithmetic(1);
        let verdict = arithmetic.verdicts.iter().find(|v| v.dtype == DataType::F32).unwrap();
        let broken: Vec<_> = verdict.broken.iter().map(|(p, _)| *p).collect();
        assert_eq!(
            broken.contains(&property.unwrap_or(Property::Rounding)),
            property.is_some(),
            "{fault:?}: {verdict:?}"
        );
        assert_eq!(arithmetic.allows(DataType::F32), reduced_on == ReducedOn::Device, "{fault:?}: {verdict:?}");
        assert_eq!(broken.is_empty(), fault == Fault::None, "{fault:?}: {verdict:?}");
        // The others are sound, and so are the other types.
        assert!(comm.arithmetic(0).allows(DataType::F32) && comm.arithmetic(2).allows(DataType::F32));
        assert!(arithmetic.allows(DataType::I32));
        assert!(arithmetic.verdicts.iter().all(|v| v.dtype == DataType::F32 || v.broken.is_empty()));

        // Longer than what goes to the host anyway: without a verdict the device would reduce it, wrong.
        for op in ReduceOp::ALL {
            let shape = Shape { collective: Collective::AllReduce, ranks: 3, count: 40_000, in_place: false };
            let bench = Bench::new(&devices, &shape, DataType::F32, Some(op), |r, i| hard_float(r, i, 3));
            let call = comm.call(Collective::AllReduce, Some(op), bench.parts());
            let pending = call.algorithm(Some(allhands::Algorithm::OneShot)).start().unwrap();
            pending.wait().unwrap();
            assert_eq!(pending.report().reduced_on, reduced_on, "{fault:?} {op}");
            bench.verify().unwrap_or_else(|e| panic!("{fault:?} {op}: {e}"));
        }
    }
}

/// The devices of the cell keep the rules for every type that they have kernels for.
#[test]
fn the_devices_here_are_sound() {
    let devices = common::ranks(common::names().len().max(2));
    let comm = builder(&devices).build().unwrap();
    for rank in 0..comm.ranks() {
        for verdict in &comm.arithmetic(rank).verdicts {
            assert!(verdict.is_sound(), "{}: {verdict:?}", comm.device(rank).info().name);
        }
    }
}

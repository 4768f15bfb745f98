//! All the GPUs of a machine, whatever their vendor, working on one buffer.
//!
//! ```
//! use allhands::{Buffer, Communicator, ReduceOp, devices};
//!
//! # fn main() -> allhands::Result<()> {
//! // The host twice; `devices::found()` lists the GPUs.
//! let ranks = [devices::open(&"cpu".parse()?)?, devices::open(&"cpu".parse()?)?];
//! let comm = Communicator::builder().rank(ranks[0].clone()).rank(ranks[1].clone()).build()?;
//!
//! let data = [Buffer::from_slice(&ranks[0], &[1.0_f32, 2.0])?, Buffer::from_slice(&ranks[1], &[10.0_f32, 20.0])?];
//! comm.all_reduce(&data, ReduceOp::Sum)?.wait()?;
//! assert_eq!(data[0].read::<f32>()?, [11.0, 22.0]);
//! assert_eq!(data[1].read::<f32>()?, [11.0, 22.0]);
//! # Ok(())
//! # }
//! ```
//!
//! # The parts
//! A call goes down this list, from what people call to what is submitted:
//!
//! | module | idea |
//! |---|---|
//! | [`Communicator`] | ranks that work together, and what is asked of them |
//! | `call` | one call, checked: everything that can be wrong is found before anything is written |
//! | `group` | several calls as one |
//! | `engine` | who carries calls out; the scheduled engine is the one there is |
//! | `tuner`, `plans` | which algorithm, and the plans that are kept |
//! | [`schedule`] | a collective as data, its proof, its cost and its picture; knows of no device |
//! | `execute`, `recipes` | a lowered schedule becomes command lists; the lists that are kept |
//! | `staging`, `neutral` | the memory that data crosses in; what stands in for a rank that contributes nothing |
//! | `relay`, `exit` | carries progress between devices, submits what is held; stops when the process ends |
//! | [`Pending`] | what a call returns |
//! | `reach` | where the host reaches the callers' memory itself |
//! | `link`, `proof`, `cache` | how each pair of ranks reaches each other: found, proven, measured; measurements kept on disk |
//! | [`Arithmetic`] | whether a device's kernels keep the rules: a self-test |
//! | [`contract`] | what is asked of a device; the backends implement it |
#![forbid(unsafe_code)]

mod arithmetic;
mod buffer;
mod cache;
mod call;
mod communicator;
pub mod devices;
mod engine;
mod error;
mod execute;
mod exit;
mod group;
mod link;
mod neutral;
pub mod peers;
mod pending;
mod plans;
mod proof;
mod reach;
mod recipes;
mod relay;
pub mod schedule;
mod span;
mod speed;
mod staging;
pub mod trace;
mod tuner;

pub use allhands_contract as contract;
pub use arithmetic::{Arithmetic, Property, Verdict};
pub use buffer::Buffer;
pub use call::{Part, TYPES, supported};
pub use communicator::{Builder, Call, Communicator, DEADLINE, Split};
pub use contract::{DataType, Device, Element, Point, ReduceOp};
pub use error::{Error, Result};
pub use link::{Attempt, Link, Outcome, Sync};
pub use pending::{Pending, ReducedOn, Report};
pub use schedule::{Algorithm, Collective, Path, Shape, Transfer};
pub use span::Span;

/// The README's example is compiled and run with the documentation's.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

//! All the GPUs of a machine, whatever their vendor, working on one buffer.
#![forbid(unsafe_code)]
pub mod schedule;

//! The reductions as WGSL, written once.

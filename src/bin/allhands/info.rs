//! `allhands info`: the devices, and how each ordered pair of ranks reaches each other: found, proven, measured.
use crate::{
    Failure,
    args::{self, List},
    say,
};
use allhands::{
    Communicator, DataType, Link, ReduceOp,
    contract::{Info as Identity, Limits, SharedKind},
    devices::{self, DeviceName},
};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeMap;

#[derive(clap::Args, Debug)]
pub struct Info {
    /// Devices, a rank on each: cpu, proxy-vulkan:N, proxy-gles:N [default: every Vulkan GPU, or else cpu]
    #[arg(long, value_parser = args::list::<DeviceName>)]
    devices: Option<List<DeviceName>>,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// How the ranks of a pair reach each other.
#[derive(Serialize)]
struct Pair {
    from: u32,
    to: u32,
    path: &'static str,
    sync: &'static str,
    latency_us: f64,
    bandwidth_gb_s: f64,
    attempts: Vec<Tried>,
}

#[derive(Serialize)]
struct Tried {
    path: &'static str,
    sync: &'static str,
    outcome: String,
}

impl Info {
    pub fn run(&self) -> Result<(), Failure> {
        let found = devices::found();
        let names = match &self.devices {
            Some(List(names)) => names.clone(),
            None => args::Backend::Auto.devices()?,
        };
        // A pair needs two.
        let opened = args::open(&names, names.len().max(2))?;
        let mut builder = Communicator::builder();
        for device in &opened {
            builder = builder.rank(device.clone());
        }
        let comm = builder.build()?;
        let links: Vec<Pair> = comm.links().iter().map(pair).collect();
        let ranks: Vec<DeviceName> = names.iter().copied().cycle().take(opened.len()).collect();
        if self.json {
            let described = names.iter().zip(&opened);
            let json = json!({
                "found": found.iter().map(DeviceName::to_string).collect::<Vec<_>>(),
                "devices": described.map(|(n, d)| device_json(n, d.info(), d.limits())).collect::<Vec<_>>(),
                "ranks": ranks.iter().map(DeviceName::to_string).collect::<Vec<_>>(),
                "links": links,
            });
            return say(format_args!("{json:#}"));
        }
        let mut text = format!("Found: {}cpu\n", found.iter().map(|n| format!("{n}, ")).collect::<String>());
        for (i, (name, device)) in names.iter().zip(&opened).enumerate() {
            if !names[..i].contains(name) {
                text += &format!("\n{}", device_text(name, device.info(), device.limits()));
            }
        }
        text.push('\n');
        for (rank, name) in ranks.iter().enumerate() {
            text += &format!("rank {rank} on {name}\n");
        }
        say(format_args!("{text}\n{}", links_text(&links).trim_end()))
    }
}

fn pair(link: &Link) -> Pair {
    let tried = link.attempts.iter().map(|a| Tried {
        path: a.path.name(),
        sync: a.sync.name(),
        outcome: a.outcome.to_string(),
    });
    Pair {
        from: link.from,
        to: link.to,
        path: link.path.name(),
        sync: link.sync.name(),
        latency_us: link.latency.as_nanos() as f64 / 1e3,
        bandwidth_gb_s: link.bandwidth / 1e9,
        attempts: tried.collect(),
    }
}

fn links_text(links: &[Pair]) -> String {
    let mut out = String::from("from  to  path         sync     latency     bandwidth\n");
    for l in links {
        out += &format!(
            "{:>4}  {:>2}  {:<11}  {:<6}  {:>7.1} us  {:>7.2} GB/s\n",
            l.from, l.to, l.path, l.sync, l.latency_us, l.bandwidth_gb_s
        );
    }
    // Pairs for which the same was tried with the same end share a line.
    let mut tried: BTreeMap<(usize, &str, &str, &str), Vec<String>> = BTreeMap::new();
    for l in links {
        for (order, t) in l.attempts.iter().enumerate() {
            tried.entry((order, t.path, t.sync, &t.outcome)).or_default().push(format!("{}->{}", l.from, l.to));
        }
    }
    if !tried.is_empty() {
        out += "\nWhat was tried, best first:\n";
    }
    for ((_, path, sync, outcome), pairs) in tried {
        let who = if pairs.len() == links.len() { "all pairs".into() } else { pairs.join(" ") };
        out += &format!("  {path}, {sync}: {outcome} ({who})\n");
    }
    out
}

fn device_text(name: &DeviceName, info: &Identity, limits: &Limits) -> String {
    let either = |yes: bool, a: &'static str, b: &'static str| if yes { a } else { b };
    let kinds = |list: &[SharedKind]| match list {
        [] => "nothing".into(),
        list => list.iter().map(|k| kind_name(*k)).collect::<Vec<_>>().join(", "),
    };
    let mut out = format!("{name}: {} ({}, driver {})\n", info.name, info.backend, info.driver);
    let lines = [
        (
            "queue",
            format!(
                "{}; {}; commands are {}",
                either(
                    limits.gated,
                    "gated: submissions wait in it",
                    "not gated: submissions are held until they can run"
                ),
                either(limits.submit_blocks, "a submit does the work", "a submit returns at once"),
                either(limits.resubmit, "prepared once", "prepared for each submit"),
            ),
        ),
        (
            "memory",
            format!(
                "{}; exports {}; imports {}",
                either(limits.mapped, "kernels use host-visible memory", "kernels use device memory only"),
                kinds(&limits.memory_export),
                kinds(&limits.memory_import),
            ),
        ),
        (
            "timelines",
            format!(
                "{}, {}",
                either(limits.timeline_export, "exported", "not exported"),
                either(limits.timeline_import, "imported", "not imported")
            ),
        ),
        (
            "kernels",
            format!(
                "up to {} sources, {} buffers, {} elements; stores in units of {} bytes",
                limits.max_sources, limits.max_bindings, limits.max_kernel_elements, limits.write_granularity
            ),
        ),
    ];
    for (what, text) in lines {
        out += &format!("  {what:<10} {text}\n");
    }
    let types: Vec<DataType> =
        DataType::ALL.into_iter().filter(|t| ReduceOp::ALL.iter().any(|op| limits.reduces(*op, *t))).collect();
    if types.is_empty() {
        return out + "  no kernels: the host reduces\n";
    }
    out += &format!("  {:<10} {}\n", "", types.iter().map(|t| format!("{t:<5}")).collect::<String>().trim_end());
    for op in ReduceOp::ALL {
        let cell = |t: &DataType| format!("{:<5}", either(limits.reduces(op, *t), "yes", "host"));
        out += &format!("  {op:<10} {}\n", types.iter().map(cell).collect::<String>().trim_end());
    }
    out
}

fn device_json(name: &DeviceName, info: &Identity, limits: &Limits) -> Value {
    let kinds = |list: &[SharedKind]| list.iter().map(|k| kind_name(*k)).collect::<Vec<_>>();
    json!({
        "name": name.to_string(),
        "backend": info.backend,
        "device": info.name,
        "driver": info.driver,
        "gated": limits.gated,
        "resubmit": limits.resubmit,
        "submit_blocks": limits.submit_blocks,
        "mapped": limits.mapped,
        "max_sources": limits.max_sources,
        "max_bindings": limits.max_bindings,
        "max_kernel_elements": limits.max_kernel_elements,
        "write_granularity": limits.write_granularity,
        "copy_granularity": limits.copy_granularity,
        "memory_export": kinds(&limits.memory_export),
        "memory_import": kinds(&limits.memory_import),
        "timeline_export": limits.timeline_export,
        "timeline_import": limits.timeline_import,
        "kernels": limits.kernels.iter().map(|(op, t)| json!([op.name(), t.name()])).collect::<Vec<_>>(),
    })
}

fn kind_name(kind: SharedKind) -> &'static str {
    match kind {
        SharedKind::DmaBuf => "dma-buf",
        SharedKind::OpaqueFd => "opaque-fd",
        SharedKind::Host => "host",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_with_the_same_end_share_a_line() {
        let pair = |from, to, outcome: &str| Pair {
            from,
            to,
            path: "copied",
            sync: "relay",
            latency_us: 1.0,
            bandwidth_gb_s: 2.0,
            attempts: vec![Tried { path: "shared-host", sync: "relay", outcome: outcome.into() }],
        };
        let text = links_text(&[pair(0, 1, "refused: no import"), pair(1, 0, "refused: no import")]);
        assert!(text.contains("shared-host, relay: refused: no import (all pairs)"), "{text}");
        let text = links_text(&[pair(0, 1, "refused: no import"), pair(1, 0, "failed its proof: zeros")]);
        assert!(text.contains("(0->1)") && text.contains("zeros (1->0)"), "{text}");
    }
}

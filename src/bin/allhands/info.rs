//! `allhands info`: the devices, and how each ordered pair of ranks reaches each other: found, proven, measured.
use crate::{
    Failure,
    args::{self, List},
    say,
};
use allhands::{
    Algorithm, Arithmetic, Collective, Communicator, DataType, Device, Link, Property, ReduceOp, Verdict,
    contract::{Info as Identity, Limits, SharedKind},
    devices::{self, DeviceName},
};
use serde::Serialize;
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc, time::Duration};

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
    /// Forms of memory that were refused before one was accepted.
    refused: Vec<String>,
}

impl Info {
    pub fn run(&self) -> Result<(), Failure> {
        let found = devices::every();
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
        let ranks: Vec<DeviceName> = names.iter().cloned().cycle().take(opened.len()).collect();
        if self.json {
            let described = (0..).zip(names.iter().zip(&opened));
            let json_of = |(rank, (name, device)): (u32, (&DeviceName, &Arc<dyn Device>))| {
                device_json(name, device.info(), device.limits(), comm.arithmetic(rank))
            };
            let json = json!({
                "found": found.iter().map(DeviceName::to_string).collect::<Vec<_>>(),
                "devices": described.map(json_of).collect::<Vec<_>>(),
                "ranks": ranks.iter().map(DeviceName::to_string).collect::<Vec<_>>(),
                "host_reaches": (0..comm.ranks()).map(|rank| comm.host_reaches(rank).err()).map(reach_json).collect::<Value>(),
                "links": links,
                "measuring_ms": comm.measuring().as_secs_f64() * 1e3,
                "switch_points": switch_points_json(&comm),
            });
            return say(format_args!("{json:#}"));
        }
        let mut text = format!("Found: {}cpu\n", found.iter().map(|n| format!("{n}, ")).collect::<String>());
        for (i, (name, device)) in names.iter().zip(&opened).enumerate() {
            if !names[..i].contains(name) {
                text += &format!("\n{}", device_text(name, device.info(), device.limits()));
                text += &arithmetic_text(comm.arithmetic(i as u32));
            }
        }
        text.push('\n');
        for (rank, name) in (0..).zip(&ranks) {
            let reach = match comm.host_reaches(rank) {
                Ok(()) => "host workers reach its memory".into(),
                Err(why) => format!("host workers keep off its memory: {why}"),
            };
            text += &format!("rank {rank} on {name}; {reach}\n");
        }
        text += &format!("\n{}", links_text(&links));
        text += &match comm.measuring() {
            Duration::ZERO => "Measured by an earlier process.\n".into(),
            took => format!("Measured in {:.1} ms.\n", took.as_secs_f64() * 1e3),
        };
        text += &format!("\n{}", switch_points_text(&comm));
        say(text.trim_end())
    }
}

/// `true`, or why not.
fn reach_json(why_not: Option<&str>) -> Value {
    why_not.map_or(json!(true), |why| json!(why))
}

fn pair(link: &Link) -> Pair {
    let tried = link.attempts.iter().map(|a| Tried {
        path: if a.one_way { "peer one way" } else { a.path.name() },
        sync: a.sync.name(),
        outcome: a.outcome.to_string(),
        refused: a.refused.clone(),
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
    let mut refused: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for l in links {
        let pair = format!("{}->{}", l.from, l.to);
        for (order, t) in l.attempts.iter().enumerate() {
            tried.entry((order, t.path, t.sync, &t.outcome)).or_default().push(pair.clone());
            for why in &t.refused {
                let pairs = refused.entry(why).or_default();
                pairs.extend((!pairs.contains(&pair)).then(|| pair.clone()));
            }
        }
    }
    if !tried.is_empty() {
        out += "\nWhat was tried, best first:\n";
    }
    for ((_, path, sync, outcome), pairs) in tried {
        let who = if pairs.len() == links.len() { "all pairs".into() } else { pairs.join(" ") };
        out += &format!("  {path}, {sync}: {outcome} ({who})\n");
    }
    if !refused.is_empty() {
        out += "\nForms of memory that were refused where another was accepted:\n";
    }
    for (why, pairs) in refused {
        out += &format!("  {why} ({})\n", pairs.join(" "));
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

fn arithmetic_text(arithmetic: &Arithmetic) -> String {
    let mut out = String::new();
    for verdict in &arithmetic.verdicts {
        let what = match (verdict.is_sound(), verdict.broken.is_empty()) {
            (true, true) => "keeps every rule",
            (true, false) => "flushes subnormals: results with them may differ from another device's",
            (false, _) => "left to the host",
        };
        let start = if out.is_empty() { "arithmetic" } else { "" };
        out += &format!("  {start:<10} {:<5} {what}\n", verdict.dtype);
        for (property, case) in &verdict.broken {
            out += &format!("  {:<10} {:<5} {property}: {case}\n", "", "");
        }
    }
    out
}

fn arithmetic_json(arithmetic: &Arithmetic) -> Value {
    let one = |verdict: &Verdict| {
        let mut json = json!({ "type": verdict.dtype.name(), "reduces": verdict.is_sound() });
        for property in Property::ALL {
            let broken = verdict.broken.iter().find(|(p, _)| *p == property);
            json[property.name()] = broken.map_or(json!(true), |(_, case)| json!(case));
        }
        json
    };
    arithmetic.verdicts.iter().map(one).collect()
}

/// The types that all_reduce chooses for alike share a line.
fn switch_points(comm: &Communicator) -> Vec<(Vec<DataType>, Vec<(u64, Algorithm)>)> {
    let mut lines: Vec<(Vec<DataType>, Vec<(u64, Algorithm)>)> = Vec::new();
    for dtype in DataType::ALL.into_iter().filter(|t| allhands::supported(Some(ReduceOp::Sum), *t)) {
        let points = comm.switch_points(&Collective::AllReduce, dtype);
        match lines.iter_mut().find(|(_, of)| *of == points) {
            Some((types, _)) => types.push(dtype),
            None => lines.push((vec![dtype], points)),
        }
    }
    lines
}

fn switch_points_text(comm: &Communicator) -> String {
    let mut out = String::from("all_reduce, sum, takes unless another is named:\n");
    for (types, points) in switch_points(comm) {
        let types = types.iter().map(|t| t.name()).collect::<Vec<_>>().join(" ");
        let from = |(bytes, algorithm): &(u64, Algorithm)| format!("{algorithm} from {}", bytes_text(*bytes));
        out += &format!("  {types}: {}\n", points.iter().map(from).collect::<Vec<_>>().join(", "));
    }
    out
}

fn switch_points_json(comm: &Communicator) -> Value {
    let point = |(bytes, algorithm): &(u64, Algorithm)| json!({ "bytes": bytes, "algorithm": algorithm.name() });
    let one = |(types, points): &(Vec<DataType>, Vec<(u64, Algorithm)>)| {
        json!({
            "collective": Collective::AllReduce.name(),
            "types": types.iter().map(|t| t.name()).collect::<Vec<_>>(),
            "from": points.iter().map(point).collect::<Vec<_>>(),
        })
    };
    switch_points(comm).iter().map(one).collect()
}

/// A power of two.
fn bytes_text(bytes: u64) -> String {
    match bytes.ilog2() {
        power @ 20.. => format!("{} MiB", 1_u64 << (power - 20)),
        power @ 10.. => format!("{} KiB", 1_u64 << (power - 10)),
        power => format!("{} B", 1_u64 << power),
    }
}

fn device_json(name: &DeviceName, info: &Identity, limits: &Limits, arithmetic: &Arithmetic) -> Value {
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
        "arithmetic": arithmetic_json(arithmetic),
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
    fn arithmetic_is_told_rule_by_rule() {
        let verdict = |dtype, broken| Verdict { dtype, broken };
        let flush = vec![(Property::SubnormalInput, "product of 1".into())];
        let nan = vec![(Property::Nan, "max of 2".into())];
        let verdicts =
            vec![verdict(DataType::F32, flush), verdict(DataType::F16, nan), verdict(DataType::F64, Vec::new())];
        let arithmetic = Arithmetic { verdicts };
        let text = arithmetic_text(&arithmetic);
        for line in ["f32   flushes", "subnormal_input: product", "f16   left to the host", "f64   keeps every rule"] {
            assert!(text.contains(line), "{text}");
        }
        let json = arithmetic_json(&arithmetic);
        assert_eq!((&json[0]["reduces"], &json[1]["reduces"]), (&json!(true), &json!(false)));
        assert_eq!((&json[1]["nan"], &json[1]["rounding"]), (&json!("max of 2"), &json!(true)));
    }

    #[test]
    fn sizes_are_told_in_binary_units() {
        let texts = [4, 512, 1 << 10, 512 << 10, 1 << 20, 256 << 20].map(bytes_text);
        assert_eq!(texts, ["4 B", "512 B", "1 KiB", "512 KiB", "1 MiB", "256 MiB"]);
    }

    #[test]
    fn pairs_with_the_same_end_share_a_line() {
        let pair = |from, to, outcome: &str| Pair {
            from,
            to,
            path: "copied",
            sync: "relay",
            latency_us: 1.0,
            bandwidth_gb_s: 2.0,
            attempts: vec![Tried {
                path: "shared-host",
                sync: "relay",
                outcome: outcome.into(),
                refused: vec!["Host: no".into()],
            }],
        };
        let text = links_text(&[pair(0, 1, "refused: no import"), pair(1, 0, "refused: no import")]);
        assert!(text.contains("shared-host, relay: refused: no import (all pairs)"), "{text}");
        assert!(text.contains("Host: no (0->1 1->0)"), "{text}");
        let text = links_text(&[pair(0, 1, "refused: no import"), pair(1, 0, "failed its proof: zeros")]);
        assert!(text.contains("(0->1)") && text.contains("zeros (1->0)"), "{text}");
    }
}

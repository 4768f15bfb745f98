//! Against NCCL, on all of a machine's NVIDIA GPUs: by its defaults, and once more without peer access
//! (`NCCL_P2P_DISABLE=1`), where its data takes the way through host memory that ours takes.
//!
//! CUDA's and NCCL's headers and libraries are looked for where their installers and Python's wheels put them.

use super::{Options, Turns, chart, compile, median, size, write};
use crate::json::quote;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What is compiled against, and what is linked. The last two headers are the first two's own.
const HEADERS: [&str; 4] = ["nccl.h", "cuda_runtime.h", "crt/host_config.h", "nv/target"];
const LIBRARIES: [&str; 2] = ["libnccl.so", "libcudart.so"];

/// One contender at one size: medians over the rounds, in microseconds.
struct Row {
    bytes: u64,
    name: String,
    /// A call, and waiting for it.
    call: f64,
    /// A call among calls that follow each other.
    train: f64,
}

pub fn run(options: &Options) -> Result<bool, String> {
    let (target, program) = super::ours(options)?;
    let theirs = build(&target)?;
    let nccl = |name, variables: &[(&str, &str)]| {
        let mut command = Command::new(&theirs);
        command.env_remove("NCCL_P2P_DISABLE").envs(variables.iter().copied());
        Turns::start(name, command)
    };
    let default = nccl("nccl", &[])?;
    let gpus: usize = default.greeting.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    if gpus < 2 {
        return Err(format!("a comparison with NCCL takes two NVIDIA GPUs, and here it finds {gpus}"));
    }
    let devices = options.devices.clone().unwrap_or_else(|| {
        let names: Vec<_> = (0..gpus).map(|i| format!("vulkan:{i}")).collect();
        names.join(",")
    });
    let mut ours = Command::new(program);
    ours.args(["rounds", "--devices", &devices, "-g", &gpus.to_string()]);
    let mut contenders = [
        (Turns::start("ours", ours)?, "out auto alone"),
        (default, ""),
        (nccl("nccl, no peer access", &[("NCCL_P2P_DISABLE", "1")])?, ""),
    ];
    println!("\n{}\n{}", contenders[0].0.greeting, contenders[1].0.greeting);
    for (name, value) in std::env::vars().filter(|(name, _)| name.starts_with("NCCL_") && name != "NCCL_HOME") {
        println!("{name}={value}, as the caller has it");
    }
    println!("f32, sum, out of place, {gpus} ranks; {} rounds; times in us, medians\n", options.rounds);
    println!("{:>8}  {:<22} {:>12} {:>12} {:>10} {:>10}", "size", "", "call", "in a train", "of NCCL's", "no peer");

    let (mut rows, mut wrong) = (Vec::<Row>::new(), 0.0);
    for &bytes in
        options.sizes.as_deref().unwrap_or(&[4 << 10, 20 << 10, 64 << 10, 256 << 10, 1 << 20, 16 << 20, 256 << 20])
    {
        let repetitions = (64_u64 << 20).div_ceil(bytes).clamp(5, 200);
        let mut answers = contenders.each_ref().map(|_| Vec::new());
        for round in 0..options.rounds as usize {
            // Nobody always follows the same one.
            for turn in 0..contenders.len() {
                let number = (turn + round) % contenders.len();
                let (program, how) = &mut contenders[number];
                let answer = program.ask(format!("{bytes} {repetitions} {how}").trim())?;
                wrong += answer.number("wrong")?;
                answers[number].push((answer.number("call")?, answer.number("train")?));
            }
        }
        let first = rows.len();
        for ((program, _), answers) in contenders.iter().zip(&answers) {
            let [call, train] = [median(answers.iter().map(|a| a.0)), median(answers.iter().map(|a| a.1))];
            rows.push(Row { bytes, name: program.name.clone(), call, train });
        }
        for row in &rows[first..] {
            let of = |other: usize| row.call / rows[first + other].call;
            let Row { name, call, train, .. } = row;
            println!("{:>8}  {name:<22} {call:>12.1} {train:>12.1} {:>10.2} {:>10.2}", size(bytes), of(1), of(2));
        }
    }
    println!();
    let lines = rows.iter().map(|r| (r.name.as_str(), r.bytes, r.call));
    let trains = rows.iter().map(|r| (r.name.as_str(), r.bytes, r.train));
    let panels =
        [chart::Panel::new("time of a call, us", lines), chart::Panel::new("time in a train of calls, us", trains)];
    let svg = chart::draw("all_reduce, sum of f32, against NCCL", &contenders[1].0.greeting, &panels);
    write(&target, "nccl", &json(&rows), &svg)?;
    if wrong > 0.0 {
        println!("{wrong} elements are wrong");
    }
    Ok(wrong == 0.0)
}

fn json(rows: &[Row]) -> String {
    let row = |r: &Row| {
        let Row { bytes, name, call, train } = r;
        format!("{{\"size\":{bytes},\"name\":{},\"call_us\":{call:.3},\"train_us\":{train:.3}}}", quote(name))
    };
    format!("{{\"rows\":[\n{}\n]}}\n", rows.iter().map(row).collect::<Vec<_>>().join(",\n"))
}

/// Compiles the program that calls NCCL.
fn build(target: &Path) -> Result<PathBuf, String> {
    let roots = roots();
    let has = |header: &&str| roots.iter().map(|r| r.join("include")).find(|include| include.join(header).exists());
    let library = |name: &&str| roots.iter().find_map(|root| library_in(root, name));
    if let Some(lacking) =
        HEADERS[..2].iter().find(|h| has(h).is_none()).or(LIBRARIES.iter().find(|l| library(l).is_none()))
    {
        return Err(format!(
            "a comparison with NCCL takes CUDA's and NCCL's headers and libraries, and there is no {lacking}: name their \
             directories in CUDA_HOME and NCCL_HOME, or have Python find the wheels of nvidia-nccl and the CUDA toolkit"
        ));
    }
    let mut arguments: Vec<OsString> = Vec::new();
    for include in HEADERS.iter().filter_map(has) {
        arguments.extend(["-I".into(), include.into()]);
    }
    for library in LIBRARIES.iter().filter_map(library) {
        let directory = library.parent().unwrap_or(Path::new("/")).display();
        arguments.extend([format!("-Wl,-rpath,{directory}").into(), library.clone().into()]);
    }
    compile("g++", target, "nccl_all_reduce.cpp", include_str!("nccl.cpp"), &arguments)
}

/// Directories with `include` and `lib` of CUDA or NCCL.
fn roots() -> Vec<PathBuf> {
    let mut roots: Vec<PathBuf> =
        ["NCCL_HOME", "CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os).map(Into::into).collect();
    roots.extend(["/usr/local/cuda", "/usr", "/usr/local"].map(PathBuf::from));
    let mut python = Command::new("python3");
    python.args(["-c", "import nvidia; print(*nvidia.__path__, sep='\\n')"]);
    // A machine without Python, or without the wheels, has them elsewhere or not at all.
    let wheels = python.output().map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
    for directory in wheels.lines().filter_map(|line| std::fs::read_dir(line).ok()) {
        roots.extend(directory.flatten().map(|entry| entry.path()));
    }
    roots
}

/// A library of a root, whatever version its name ends in.
fn library_in(root: &Path, name: &str) -> Option<PathBuf> {
    let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    let directories = ["lib64".into(), "lib".into(), multiarch].map(|d: String| root.join(d));
    let listed = directories.iter().filter_map(|d| std::fs::read_dir(d).ok()).flat_map(|d| d.flatten());
    let mut found: Vec<_> = listed
        .map(|e| e.path())
        .filter(|p| p.file_name().and_then(|f| f.to_str()).is_some_and(|f| f.starts_with(name)))
        .collect();
    found.sort();
    found.into_iter().next()
}

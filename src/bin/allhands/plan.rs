//! `allhands plan`: the lowered schedule of a collective, with what it costs. No device is opened.
use crate::{
    Failure,
    args::{self, Auto},
    kind::{Job, Kind},
    say,
};
use allhands::{
    Algorithm, Path, Shape,
    schedule::{
        Chunking, algorithms, build,
        cost::{Model, Speed, timeline},
        draw,
        lower::{Links, batches, lower},
    },
};
use std::{fmt::Write, path::PathBuf};

#[derive(clap::Args, Debug)]
pub struct Plan {
    /// all_reduce, reduce_scatter, all_gather, broadcast, reduce, gather, scatter, all_to_all, sendrecv or barrier
    collective: Kind,
    /// Ranks
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    ranks: u32,
    /// one-shot, two-shot, host, ring or tree
    #[arg(long)]
    algorithm: Algorithm,
    /// Elements of f32, as the call takes them
    #[arg(long, default_value_t = 1024)]
    count: u64,
    /// The root of broadcast, reduce, gather and scatter
    #[arg(short, long, default_value_t = 0)]
    root: u32,
    /// Outputs lie over inputs
    #[arg(long)]
    in_place: bool,
    /// peer, shared-host or copied
    #[arg(long, default_value = "copied")]
    path: Path,
    /// Devices have host-visible memory that kernels use
    #[arg(long)]
    mapped: bool,
    /// Elements of a chunk of a pipelined message; auto: all in one
    #[arg(long, value_parser = args::auto::<u64>, default_value = "auto")]
    chunk: Auto<u64>,
    /// Microseconds from the end of one step to its effect elsewhere
    #[arg(long, default_value_t = 20.0)]
    alpha: f64,
    /// GB/s that an actor copies or folds
    #[arg(long, default_value_t = 10.0)]
    beta: f64,
    /// Draws it
    #[arg(long)]
    svg: Option<PathBuf>,
}

/// As the executor's kernels: more sources become a chain.
const MAX_SOURCES: u32 = 8;
/// Chunks between a step and one that depends on it, where there are chunks.
const DISTANCE: u32 = 2;
/// Bytes of an f32.
const ELEMENT: u64 = 4;

impl Plan {
    pub fn run(&self) -> Result<(), Failure> {
        let (text, svg) = self.draw()?;
        say(text.trim_end())?;
        match &self.svg {
            Some(path) => std::fs::write(path, svg).map_err(|e| Failure::Run(format!("{}: {e}", path.display()))),
            None => Ok(()),
        }
    }

    /// As text and as SVG.
    fn draw(&self) -> Result<(String, String), Failure> {
        if self.root >= self.ranks {
            return Err(Failure::Usage(format!("--root: root {} is no rank of {}", self.root, self.ranks)));
        }
        if !(self.alpha >= 0.0 && self.beta > 0.0) {
            return Err(Failure::Usage("--alpha must not be below 0, --beta must be above 0".into()));
        }
        if self.in_place && !self.collective.in_place() {
            return Err(Failure::Usage(format!("{} has no in-place form", self.collective)));
        }
        let job = Job { kind: self.collective, ranks: self.ranks, root: self.root, count: self.count };
        let shape =
            Shape { collective: job.collective(), ranks: self.ranks, count: self.count, in_place: self.in_place };
        let chunking = match self.chunk.0 {
            None | Some(0) => Chunking::WHOLE,
            Some(chunk) => Chunking { chunk, distance: DISTANCE },
        };
        let Some(logical) = build(&shape, self.algorithm, chunking) else {
            let have: Vec<&str> = algorithms(&shape.collective).iter().map(|a| a.name()).collect();
            let (what, have) = (self.collective, have.join(", "));
            return Err(Failure::Usage(format!("{what} has no {} algorithm; it has {have}", self.algorithm)));
        };
        let links = Links::uniform(self.ranks, self.path, self.mapped, MAX_SOURCES);
        let schedule = lower(&logical, &links);
        let speed = Speed { submit: 0.0, launch: 0.0, copy: self.beta * 1e9, reduce: self.beta * 1e9, overlap: false };
        let times = timeline(&schedule, &Model::uniform(self.ranks, ELEMENT, speed, speed, self.alpha * 1e-6));

        let mut text = draw::text(&schedule);
        let batches = batches(&schedule);
        let submissions = |actors: std::ops::Range<usize>| -> usize { batches[actors].iter().map(Vec::len).sum() };
        let ranks = self.ranks as usize;
        let staging: u64 = schedule.slots.iter().map(|s| s.len * ELEMENT).sum();
        let (of_ranks, of_hosts) = (submissions(0..ranks), submissions(ranks..schedule.steps.len()));
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{} over {} links: {:.1} us with {} us a hop and {} GB/s an actor; {of_ranks} submissions of ranks, {of_hosts} of \
             host workers; {staging} bytes of staging",
            self.algorithm,
            self.path,
            times.end() * 1e6,
            self.alpha,
            self.beta,
        );
        Ok((text, draw::svg(&schedule, Some(&times))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        plan: Plan,
    }

    fn draw(line: &str) -> Result<(String, String), Failure> {
        Line::try_parse_from(std::iter::once("plan").chain(line.split_whitespace())).unwrap().plan.draw()
    }

    #[test]
    fn plans_are_costed_and_drawn() {
        let (text, svg) = draw("all-reduce --ranks 2 --algorithm one-shot --path shared-host --alpha 10").unwrap();
        assert!(text.contains("one-shot over shared-host links") && text.contains("reduce"), "{text}");
        assert!(svg.starts_with("<svg") || svg.starts_with("<?xml"));
        let cost = |alpha: u32| {
            let line = format!("all_reduce --ranks 4 --algorithm ring --chunk 100 --alpha {alpha}");
            let (text, _) = draw(&line).unwrap();
            let at = text.rfind(" us with").unwrap();
            text[..at].rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        // A ring of four has six dependent steps.
        assert!(cost(1000) - cost(0) >= 6000.0, "{} {}", cost(1000), cost(0));
    }

    #[test]
    fn what_cannot_be_planned_is_refused() {
        for line in [
            "all_to_all --ranks 2 --algorithm tree",
            "reduce --ranks 2 --algorithm ring --root 2",
            "sendrecv --ranks 2 --algorithm one-shot --in-place",
            "all_reduce --ranks 2 --algorithm ring --beta 0",
        ] {
            assert!(matches!(draw(line), Err(Failure::Usage(_))), "{line}");
        }
    }
}

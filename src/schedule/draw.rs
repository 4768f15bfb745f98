//! The picture of a schedule: as SVG, a lane for each actor; as text, a line for each action.
use super::{cost::Timeline, lower::batches, order, *};
use std::fmt::Write;

/// Draws the schedule: a lane for each rank and under it its host worker, a box for each step, an arrow for each
/// dependency. With a timeline, across is time; without, depth. Pointing at a box shows what it does.
pub fn svg(schedule: &Schedule, timeline: Option<&Timeline>) -> String {
    Drawing::new(schedule, timeline).draw()
}

/// Lists the schedule: its staging, then actor by actor each step, what it follows, and its actions.
pub fn text(schedule: &Schedule) -> String {
    let mut out = format!("{}\n", title(schedule));
    for (index, slot) in schedule.slots.iter().enumerate() {
        let (name, len, offset) = (slot_name(schedule, index as u32), slot.len, slot.offset);
        line(&mut out, format_args!("  {name}: {len} elements at {offset}"));
    }
    for (actor, steps) in schedule.steps.iter().enumerate().filter(|(_, s)| !s.is_empty()) {
        line(&mut out, format_args!("{}", actor_name(schedule, actor as Actor)));
        for (index, step) in steps.iter().enumerate() {
            line(&mut out, format_args!("  step {index}{}", following(schedule, step)));
            step.actions.iter().for_each(|a| line(&mut out, format_args!("    {}", action_text(schedule, a))));
        }
    }
    out
}

fn line(out: &mut String, what: std::fmt::Arguments<'_>) {
    // Writing to a string cannot fail.
    let _ = writeln!(out, "{what}");
}

fn title(schedule: &Schedule) -> String {
    let Shape { collective, ranks, count, in_place } = &schedule.shape;
    let mut out = format!("{collective}, {ranks} {}", if *ranks == 1 { "rank" } else { "ranks" });
    if !matches!(collective, Collective::Barrier | Collective::SendRecv(_)) {
        let _ = write!(out, ", {count} elements, {}", if *in_place { "in place" } else { "out of place" });
    }
    if let Some(root) = collective.root() {
        let _ = write!(out, ", root {root}");
    }
    out
}

fn actor_name(schedule: &Schedule, actor: Actor) -> String {
    match actor.checked_sub(schedule.shape.ranks) {
        None => format!("rank {actor}"),
        Some(rank) => format!("host {rank}"),
    }
}

fn slot_name(schedule: &Schedule, index: u32) -> String {
    let slot = &schedule.slots[index as usize];
    let home = match slot.home {
        Home::Outbox => "outbox",
        Home::Worker => "worker",
        Home::Device => "device",
        Home::Upload => "upload",
        Home::Download => "download",
        Home::Mapped => "mapped",
        Home::Shared => "shared",
        Home::Inbox => "inbox",
    };
    format!("slot{index}({home} of {})", slot.owner)
}

fn region_text(schedule: &Schedule, region: &Region) -> String {
    let place = match region.place {
        Place::Input(rank) => format!("input{rank}"),
        Place::Output(rank) => format!("output{rank}"),
        Place::Slot(slot) => slot_name(schedule, slot),
    };
    format!("{place}[{}..{}]", region.start, region.end())
}

fn action_text(schedule: &Schedule, action: &Action) -> String {
    let list = |regions: &[Region], between| {
        regions.iter().map(|r| region_text(schedule, r)).collect::<Vec<_>>().join(between)
    };
    let (name, end) = match action {
        Action::Copy { .. } => ("copy", ""),
        Action::Reduce { finish: false, .. } => ("reduce", ""),
        Action::Reduce { finish: true, .. } => ("reduce", ", finish"),
    };
    format!("{name} {} -> {}{end}", list(action.sources(), " + "), list(action.destinations(), ", "))
}

fn following(schedule: &Schedule, step: &Step) -> String {
    let names = step.after.iter().map(|s| format!("{} step {}", actor_name(schedule, s.actor), s.index));
    let names = names.collect::<Vec<_>>().join(", ");
    if names.is_empty() { names } else { format!(" after {names}") }
}

/// What an action is for, as the legend tells it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Role {
    Publish,
    Carry,
    Fetch,
    Reduce,
    Order,
}

impl Role {
    const ALL: [Role; 5] = [Role::Publish, Role::Carry, Role::Fetch, Role::Reduce, Role::Order];

    fn of(schedule: &Schedule, actor: Actor, action: &Action) -> Role {
        // Only what others reach counts as published: a copy within the rank's own memory is fetching.
        let published = |r: &Region| match r.place {
            Place::Slot(slot) => schedule.slots[slot as usize].home != Home::Device,
            Place::Input(_) | Place::Output(_) => false,
        };
        match action {
            Action::Reduce { .. } => Role::Reduce,
            Action::Copy { .. } if actor >= schedule.shape.ranks => Role::Carry,
            Action::Copy { dsts, .. } if dsts.iter().any(published) => Role::Publish,
            Action::Copy { .. } => Role::Fetch,
        }
    }
    fn look(self) -> (&'static str, &'static str) {
        match self {
            Role::Publish => ("publish", "#3b82c4"),
            Role::Carry => ("carry", "#e0932f"),
            Role::Fetch => ("fetch", "#7a9e58"),
            Role::Reduce => ("reduce", "#b8456b"),
            Role::Order => ("order", "#8a8f98"),
        }
    }
}

const LEFT: f64 = 84.0;
const TOP: f64 = 78.0;
const LANE: f64 = 46.0;
const BOX: f64 = 26.0;
const WIDTH: f64 = 1160.0;

struct Drawing<'a> {
    schedule: &'a Schedule,
    timeline: Timeline,
    timed: bool,
    /// Actors from top to bottom.
    lanes: Vec<Actor>,
    /// Pixels a second, or a level.
    scale: f64,
    out: String,
}

impl<'a> Drawing<'a> {
    fn new(schedule: &'a Schedule, timeline: Option<&Timeline>) -> Self {
        let timed = timeline.is_some();
        let timeline = timeline.cloned().unwrap_or_else(|| by_depth(schedule));
        let ranks = schedule.shape.ranks;
        let both = (0..ranks).flat_map(|r| [r, r + ranks]);
        let lanes = both.filter(|a| schedule.steps.get(*a as usize).is_some_and(|s| !s.is_empty())).collect();
        let end = if timeline.end() > 0.0 { timeline.end() } else { 1.0 };
        // Many short steps make the picture wider rather than unreadable.
        let most = schedule.steps.iter().map(Vec::len).max().unwrap_or(0) as f64;
        let scale = WIDTH.max(most * 30.0) / end;
        Drawing { schedule, timeline, timed, lanes, scale, out: String::new() }
    }

    fn x(&self, time: f64) -> f64 {
        LEFT + time * self.scale
    }
    /// The middle of the actor's lane.
    fn y(&self, actor: Actor) -> f64 {
        let lane = self.lanes.iter().position(|a| *a == actor).unwrap_or(0);
        TOP + LANE * lane as f64 + LANE / 2.0
    }

    fn draw(mut self) -> String {
        let (width, bottom) =
            (self.x(self.timeline.end()).max(LEFT + WIDTH) + 24.0, TOP + LANE * self.lanes.len() as f64);
        let height = bottom + 34.0;
        line(
            &mut self.out,
            format_args!(
                r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" height="{height:.0}" font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="12">
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0.8 L8 4 L0 7.2 Z" fill="#4a5361"/></marker></defs>
<rect width="100%" height="100%" fill="#ffffff"/>
<text x="16" y="28" font-size="17" font-weight="600" fill="#1d2430">{}</text>"##,
                title(self.schedule)
            ),
        );
        self.legend();
        self.axis(bottom);
        for lane in 0..self.lanes.len() {
            self.lane(lane, width);
        }
        self.arrows();
        for lane in 0..self.lanes.len() {
            self.boxes(self.lanes[lane]);
        }
        self.out.push_str("</svg>\n");
        self.out
    }

    fn legend(&mut self) {
        let mut x = 16.0;
        for role in Role::ALL {
            let (name, fill) = role.look();
            let used = self.steps().any(|(actor, step)| self.roles(actor, step).contains(&role));
            if used {
                line(
                    &mut self.out,
                    format_args!(
                        r##"<rect x="{x:.0}" y="41" width="12" height="12" rx="2.5" fill="{fill}"/><text x="{:.0}" y="51.5" fill="#4a5361">{name}</text>"##,
                        x + 17.0
                    ),
                );
                x += 78.0;
            }
        }
        let note = if self.timed {
            format!(
                "{} in all; a pale band is a submission, its start the cost of the submit",
                duration(self.timeline.end())
            )
        } else {
            "across: depth; a pale band is a submission".into()
        };
        line(&mut self.out, format_args!(r##"<text x="{:.0}" y="51.5" fill="#8a8f98">{note}</text>"##, x + 10.0));
    }

    fn axis(&mut self, bottom: f64) {
        if !self.timed || self.timeline.end() <= 0.0 {
            return;
        }
        let end = self.timeline.end();
        // 1, 2 or 5 times a power of ten, and about ten of them.
        let rough = end / 10.0;
        let power = 10f64.powf(rough.log10().floor());
        let tick = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|t| *t >= rough).unwrap_or(rough);
        let mut k = 0.0;
        while k * tick <= end {
            let x = self.x(k * tick);
            line(
                &mut self.out,
                format_args!(
                    r##"<line x1="{x:.1}" y1="{TOP}" x2="{x:.1}" y2="{bottom:.1}" stroke="#e4e7ec"/><text x="{x:.1}" y="{:.1}" text-anchor="middle" font-size="11" fill="#8a8f98">{}</text>"##,
                    bottom + 18.0,
                    duration(k * tick)
                ),
            );
            k += 1.0;
        }
    }

    fn lane(&mut self, lane: usize, width: f64) {
        let actor = self.lanes[lane];
        let (y, host) = (self.y(actor), actor >= self.schedule.shape.ranks);
        let name = actor_name(self.schedule, actor);
        let (weight, colour) = if host { (400, "#8a8f98") } else { (600, "#1d2430") };
        line(
            &mut self.out,
            format_args!(
                r##"<line x1="{LEFT}" y1="{y:.1}" x2="{:.1}" y2="{y:.1}" stroke="#d5dae1"/><text x="{:.1}" y="{:.1}" text-anchor="end" font-weight="{weight}" fill="{colour}">{name}</text>"##,
                width - 24.0,
                LEFT - 12.0,
                y + 4.0
            ),
        );
        for submission in self.timeline.submissions[actor as usize].clone() {
            let (x, w) = (self.x(submission.start), (submission.end - submission.start) * self.scale);
            line(
                &mut self.out,
                format_args!(
                    r##"<rect x="{x:.1}" y="{:.1}" width="{:.1}" height="{:.1}" rx="4" fill="#e9edf3" stroke="#c9d0da" stroke-width="0.7"/>"##,
                    y - BOX / 2.0 - 4.0,
                    w.max(3.0),
                    BOX + 8.0
                ),
            );
        }
    }

    fn arrows(&mut self) {
        let count: usize = self.steps().map(|(_, s)| s.after.len()).sum();
        let opacity = (6.0 / (count as f64).sqrt()).clamp(0.2, 0.85);
        for (actor, steps) in self.schedule.steps.iter().enumerate() {
            for (index, step) in steps.iter().enumerate() {
                let Some(to) = self.timeline.steps[actor].get(index).cloned() else { continue };
                // The arrow ends where the submission begins, which is what waits.
                let submissions = &self.timeline.submissions[actor];
                let begin = submissions.iter().rev().find(|s| s.start <= to.start).map_or(to.start, |s| s.start);
                for from in &step.after {
                    let Some(source) = self.timeline.steps[from.actor as usize].get(from.index as usize) else {
                        continue;
                    };
                    // Others see a step when its submission has ended.
                    let submissions = &self.timeline.submissions[from.actor as usize];
                    let seen =
                        submissions.iter().find(|s| self.timed && s.end >= source.end).map_or(source.end, |s| s.end);
                    let (x1, x2) = (self.x(seen), self.x(begin));
                    let (y1, y2) = (self.y(from.actor), self.y(actor as Actor));
                    let bend = ((x2 - x1) / 2.0).max(10.0);
                    line(
                        &mut self.out,
                        format_args!(
                            r##"<path d="M{x1:.1} {y1:.1} C{:.1} {y1:.1} {:.1} {y2:.1} {x2:.1} {y2:.1}" fill="none" stroke="#4a5361" stroke-width="1.1" stroke-opacity="{opacity:.2}" marker-end="url(#tip)"/>"##,
                            x1 + bend,
                            x2 - bend
                        ),
                    );
                }
            }
        }
    }

    fn boxes(&mut self, actor: Actor) {
        let y = self.y(actor) - BOX / 2.0;
        for (index, step) in self.schedule.steps[actor as usize].iter().enumerate() {
            let Some(time) = self.timeline.steps[actor as usize].get(index).cloned() else { continue };
            let (x, w) = (self.x(time.start), ((time.end - time.start) * self.scale - 1.0).max(2.5));
            let mut tip =
                format!("{} step {index}{}", actor_name(self.schedule, actor), following(self.schedule, step));
            step.actions.iter().for_each(|a| tip.extend(["\n", &action_text(self.schedule, a)]));
            let tip = tip.replace('>', "&gt;");
            line(&mut self.out, format_args!("<g><title>{tip}</title>"));
            let roles = self.roles(actor, step);
            let band = BOX / roles.len() as f64;
            for (i, role) in roles.iter().enumerate() {
                line(
                    &mut self.out,
                    format_args!(
                        r#"<rect x="{x:.1}" y="{:.1}" width="{w:.1}" height="{band:.1}" rx="2.5" fill="{}"/>"#,
                        y + band * i as f64,
                        role.look().1
                    ),
                );
            }
            let label = index.to_string();
            if w > 7.0 * label.len() as f64 + 4.0 {
                line(
                    &mut self.out,
                    format_args!(
                        r##"<text x="{:.1}" y="{:.1}" text-anchor="middle" font-size="11" fill="#ffffff">{label}</text>"##,
                        x + w / 2.0,
                        y + BOX / 2.0 + 4.0
                    ),
                );
            }
            self.out.push_str("</g>\n");
        }
    }

    fn steps(&self) -> impl Iterator<Item = (Actor, &Step)> {
        self.schedule.steps.iter().enumerate().flat_map(|(a, steps)| steps.iter().map(move |s| (a as Actor, s)))
    }
    fn roles(&self, actor: Actor, step: &Step) -> Vec<Role> {
        let mut roles: Vec<Role> = step.actions.iter().map(|a| Role::of(self.schedule, actor, a)).collect();
        roles.sort();
        roles.dedup();
        if roles.is_empty() { vec![Role::Order] } else { roles }
    }
}

/// A column for each step of the longest chain.
fn by_depth(schedule: &Schedule) -> Timeline {
    let mut steps: Vec<Vec<std::ops::Range<f64>>> = vec![Vec::new(); schedule.steps.len()];
    for id in order::linear(schedule) {
        let end = |s: &StepId| steps[s.actor as usize][s.index as usize].end.ceil();
        let before = schedule.steps[id.actor as usize][id.index as usize].after.iter().map(end);
        let own = steps[id.actor as usize].last().map(|s| s.end.ceil());
        let start = before.chain(own).fold(0.0, f64::max);
        steps[id.actor as usize].push(start..start + 0.6);
    }
    let whole = |(runs, steps): (&Vec<std::ops::Range<usize>>, &Vec<std::ops::Range<f64>>)| {
        runs.iter().filter_map(|r| Some(steps.get(r.start)?.start..steps.get(r.end - 1)?.end)).collect()
    };
    let submissions = batches(schedule).iter().zip(&steps).map(whole).collect();
    Timeline { steps, submissions }
}

fn duration(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s >= 1.0 => (s, "s"),
        s if s >= 1e-3 => (s * 1e3, "ms"),
        s => (s * 1e6, "us"),
    };
    // Three digits, and no zeros at the end.
    let digits = if value >= 100.0 {
        0
    } else if value >= 10.0 {
        1
    } else {
        2
    };
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_lists_every_step_and_action() {
        let shape = Shape { collective: Collective::AllReduce, ranks: 2, count: 5, in_place: false };
        let schedule = build(&shape, Algorithm::OneShot, Chunking::WHOLE).unwrap();
        let links = lower::Links::uniform(2, Path::Copied, true, 8);
        let text = text(&lower::lower(&schedule, &links));
        let host0 =
            "host 0\n  step 0 after rank 1 step 0\n    copy slot1(mapped of 1)[0..5] -> slot2(mapped of 0)[0..5]\n";
        assert!(text.contains(host0), "{text}");
        assert!(
            text.contains("    reduce input0[0..5] + slot2(mapped of 0)[0..5] -> output0[0..5], finish\n"),
            "{text}"
        );
    }

    #[test]
    fn svg_has_a_box_for_each_step_and_an_arrow_for_each_dependency() {
        let shape = Shape { collective: Collective::AllReduce, ranks: 3, count: 900, in_place: true };
        let schedule = build(&shape, Algorithm::Ring, Chunking { chunk: 100, distance: 2 }).unwrap();
        let svg = svg(&schedule, None);
        let steps = schedule.steps.iter().flatten();
        assert_eq!(svg.matches("<title>").count(), steps.clone().count());
        assert_eq!(svg.matches("marker-end").count(), steps.map(|s| s.after.len()).sum::<usize>());
    }

    #[test]
    fn durations_have_three_digits() {
        assert_eq!([0.0, 2.5e-6, 1.234e-4, 0.05, 12.0].map(duration), ["0 us", "2.5 us", "123 us", "50 ms", "12 s"]);
    }
}

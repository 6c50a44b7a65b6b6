//! How claims are shared between topics, and where each of them goes on.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use super::database_clock::DatabaseClock;
use super::kept_back::KeptBack;
use crate::relay::to::To;
use crate::store::relay::claim::{Batch, Claimed, Lane, Position, Stream, Topic};
use crate::store::relay::streams::Found;

/// Lanes in one claim. With more of them than this they take turns.
pub(in crate::relay) const MOST_LANES: usize = 64;
/// What is older than this, by its time of availability, was most likely committed when it was
/// passed. What was not is [`Late`](super::late::Late).
const OVERLAP: Duration = Duration::from_millis(50);
/// A lane is swept no more often than this.
const SWEEP_INTERVAL: Duration = Duration::from_secs(1);
/// Sweeps take a twentieth of the time at most: where an old snapshot keeps a million dead entries in
/// the index, a sweep reads them all.
pub(super) const SWEEP_SHARE: u32 = 20;

/// How long it is good what a look for all streams has seen of their first messages.
const LOOK_IS_GOOD: Duration = Duration::from_secs(2);

/// Messages that quiet lanes are asked for together. So few are claimed by one statement, as they are never too
/// large; a lane that has more is a busy one from then on.
const QUIET_ROOM: usize = 15;

/// A lane that is empty is kept this long: a new message of the same topic need not wait for the next survey. Under load
/// surveys are 100 ms apart, and a survey often finds a topic empty whose messages are delivered at once.
const EMPTY_KEPT: Duration = Duration::from_secs(10);

/// With more lanes than this a look for streams is slow for their number: none is kept that has nothing.
const MOST_KEPT: usize = 1000;

/// The streams of live messages, and what is known of them.
///
/// A look asks every lane until it has no more. A busy lane (it gave all it was asked for) shares
/// the room of its bulkhead with the other busy ones; quiet lanes come first and get a small place
/// each, so that a message of theirs never waits behind another topic's backlog.
///
/// A lane goes on where its last claim ended: so the entries of what was settled since, which an old
/// snapshot may keep in the index for hours, are not read again and again. What was committed late,
/// given back or left by a dead relay stands before that place. A sweep, a claim from the start,
/// finds it. Of messages with an ordering key a sweep looks at the first ones only, and the
/// [`Walk`](super::walk::Walk) finds the rest: one that is due may stand behind many of other keys that wait.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: Vec<Known>,
    kept_back: KeptBack,
    turn: usize,
    /// When the last look for all streams has seen their first messages.
    looked: Option<Instant>,
}

#[derive(Debug)]
struct Known {
    stream: Stream,
    to: To,
    state: State,
}

#[derive(Debug, Clone, Copy)]
struct State {
    /// Its last claim did not get all it asked for.
    is_quiet: bool,
    /// It had nothing more in this look.
    is_done: bool,
    /// Claims go on behind this.
    floor: Position,
    /// When the last sweep ended, and how long it took.
    swept: Option<(Instant, Duration)>,
    is_swept_in_look: bool,
    /// When its first message is due, as the last look for streams has seen it, or what was given back since.
    first: i64,
    /// When a survey or a claim last found a message.
    seen: Instant,
}

/// What a look for streams has found.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) found: Vec<Found>,
    /// No others have anything. Otherwise those that are known are not among them.
    pub(super) is_all: bool,
    /// How long it took, where that is too long: dead entries stand before the first live ones, and
    /// a sweep would only read them once more.
    pub(super) slow: Option<Duration>,
}

/// What a claim of some lanes has brought.
#[derive(Clone, Copy)]
pub(in crate::relay) struct Brought<'a> {
    pub(in crate::relay) asked: &'a [Lane],
    /// Messages that it could bring.
    pub(in crate::relay) room: usize,
    pub(in crate::relay) batch: &'a Batch,
    /// Where the look at lanes of keyed messages ended that have more.
    pub(in crate::relay) reached: &'a HashMap<Stream, Position>,
    pub(in crate::relay) took: Duration,
}

impl Brought<'_> {
    /// The claim had a limit of its own, so that the last lanes may not have been heard.
    fn is_cut(&self) -> bool {
        self.batch.is_cut || self.batch.claimed.len() >= self.room
    }
}

/// The time by both clocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Now {
    pub(super) here: Instant,
    /// As far as it is known.
    pub(super) database: DatabaseClock,
}

impl State {
    /// A stream that was just found. Keyed messages that are there already are the walk's.
    fn new(found: &Found, now: Now, slow: Option<Duration>) -> Self {
        let floor = match (found.stream.is_keyed, slow) {
            (true, _) => now.recently(OVERLAP),
            (false, None) => Position::START,
            // The message we found may be due later than others committed since.
            (false, Some(_)) => {
                Position::of_time(found.first.available_at).min(now.recently(OVERLAP))
            }
        };
        Self {
            is_quiet: false,
            is_done: false,
            floor,
            swept: slow.map(|took| (now.here, took)),
            is_swept_in_look: false,
            first: found.first.available_at,
            seen: now.here,
        }
    }

    /// Whether its next claim begins at the start. `is_asked`: somebody wants to know whether really
    /// nothing is left; of keyed messages it is the walk that tells.
    fn is_sweep_due(&self, now: Instant, is_keyed: bool, is_asked: bool) -> bool {
        let Some((at, took)) = self.swept else {
            return true;
        };
        let is_wanted = is_asked && !is_keyed && self.is_quiet && !self.is_swept_in_look;
        let age = now.saturating_duration_since(at);
        is_wanted || age >= SWEEP_INTERVAL.max(SWEEP_SHARE * took)
    }

    /// When a sweep may be made that this look has left out: nobody else tells of what only a sweep finds.
    fn owed_at(&self) -> Option<Instant> {
        let (at, took) = self.swept.filter(|_| !self.is_swept_in_look)?;
        Some(at + SWEEP_INTERVAL.max(SWEEP_SHARE * took))
    }

    /// Learns from a claim behind `after` that got all it asked for, or not, and ended at `last`.
    fn learn(
        &mut self,
        is_keyed: bool,
        after: Position,
        is_full: bool,
        last: Option<Position>,
        brought: &Brought<'_>,
        now: Now,
    ) {
        if brought.is_cut() && !is_full {
            return;
        }
        let is_sweep = after == Position::START;
        if is_sweep {
            self.swept = Some((now.here, brought.took));
        }
        if is_sweep && is_keyed && is_full {
            // Much waits there behind others of its key, or more than there is room for: the walk's.
            self.is_swept_in_look = true;
            return;
        }
        if is_full {
            self.floor = last.unwrap_or(self.floor);
            self.is_quiet = false;
            return;
        }
        // Since the claim began: what was committed after that it has not seen.
        let recent = now.recently(OVERLAP + brought.took);
        self.is_quiet = true;
        self.floor = recent;
        self.is_swept_in_look |= is_sweep;
        // Behind the last place is nothing. Right before it something may have been committed late.
        self.is_done = is_sweep || after <= recent;
    }
}

impl Known {
    fn is_of_registered(&self) -> bool {
        matches!(self.to, To::Registered(_)) && !self.stream.is_keyed
    }
}

impl Now {
    /// The place of what became available so long ago.
    fn recently(self, overlap: Duration) -> Position {
        Position::of_time(self.database.before(self.here, overlap))
    }
}

impl Lanes {
    /// Takes over the streams that were found: all, or those beside the known ones. New ones count as
    /// busy, and are to be asked.
    ///
    /// Where the look was slow, those that have nothing any more are kept: the next look beside the known
    /// ones would else read what is dead of them, and be slow, too.
    ///
    /// `true`: some were found for the first time that this relay does not take.
    pub(super) fn take_over(&mut self, seen: Seen, way: impl Fn(&Topic) -> To, now: Now) -> bool {
        let Seen {
            found,
            is_all,
            slow,
        } = seen;
        if is_all {
            let there: HashSet<&Stream> = found.iter().map(|found| &found.stream).collect();
            let keeps_empty = self.lanes.len() <= MOST_KEPT;
            self.lanes.retain_mut(|lane| {
                if there.contains(&lane.stream) {
                    lane.state.seen = now.here;
                    return true;
                }
                let is_recent = now.here.saturating_duration_since(lane.state.seen) < EMPTY_KEPT;
                keeps_empty && (slow.is_some() || is_recent && !lane.is_of_registered())
            });
        }
        if is_all {
            self.looked = Some(now.here);
            let firsts: HashMap<&Stream, i64> = (found.iter())
                .map(|found| (&found.stream, found.first.available_at))
                .collect();
            for lane in &mut self.lanes {
                let first = firsts.get(&lane.stream);
                lane.state.first = first.copied().unwrap_or(lane.state.first);
            }
        }
        // No lane twice: its messages would be claimed twice.
        let there: HashSet<&Stream> = found.iter().map(|found| &found.stream).collect();
        let known = self.lanes.iter().map(|lane| &lane.stream);
        let mut known: HashSet<Stream> = known
            .filter(|stream| there.contains(stream))
            .cloned()
            .collect();
        let new = found
            .into_iter()
            .filter(|found| known.insert(found.stream.clone()));
        let before = self.lanes.len();
        self.lanes.extend(new.map(|found| Known {
            to: way(&found.stream.topic),
            state: State::new(&found, now, slow),
            stream: found.stream,
        }));
        (self.lanes[before..].iter()).any(|lane| lane.to == To::Nowhere)
    }

    /// Lanes may go elsewhere than before. `true`: some do, and are to be asked.
    pub(super) fn go_elsewhere(&mut self, way: impl Fn(&Topic) -> To) -> bool {
        let mut any = false;
        for lane in &mut self.lanes {
            let to = way(&lane.stream.topic);
            if std::mem::replace(&mut lane.to, to) != to {
                lane.state.is_done = false;
                any = true;
            }
        }
        any
    }

    /// The topics of messages that name no destination and that this relay does not take.
    pub(super) fn nowhere(&self) -> impl Iterator<Item = String> {
        let is_it =
            |lane: &&Known| lane.to == To::Nowhere && lane.stream.topic.destination.is_empty();
        let nowhere = self.lanes.iter().filter(is_it);
        nowhere.map(|lane| lane.stream.topic.topic.clone())
    }

    /// The furthest place that claims go on behind.
    pub(super) fn passed(&self) -> Option<Position> {
        self.lanes.iter().map(|lane| lane.state.floor).max()
    }

    /// Whether claims go on behind this place.
    pub(super) fn has_passed(&self, place: &Found) -> bool {
        let lane = (self.lanes.iter()).find(|lane| lane.stream == place.stream);
        lane.is_some_and(|lane| lane.state.floor > place.first)
    }

    pub(super) fn streams(&self) -> Vec<Stream> {
        self.lanes.iter().map(|lane| lane.stream.clone()).collect()
    }

    /// What nobody is to be asked for, beside what is held. `true`: it does not have all that was kept back before.
    pub(super) fn keep_back(&mut self, kept_back: KeptBack) -> bool {
        let before = &self.kept_back;
        let is_freed = !before.topics.is_subset(&kept_back.topics)
            || !before.destinations.is_subset(&kept_back.destinations);
        let held = std::mem::take(&mut self.kept_back.held);
        self.kept_back = KeptBack { held, ..kept_back };
        is_freed
    }

    /// The topics whose settles the database refuses. `true`: some are not among them any more.
    pub(super) fn hold(&mut self, held: HashSet<Topic>) -> bool {
        let is_freed = !self.kept_back.held.is_subset(&held);
        self.kept_back.held = held;
        is_freed
    }

    pub(super) fn kept_back(&self) -> &KeptBack {
        &self.kept_back
    }

    /// Every lane may have something again.
    pub(super) fn begin_look(&mut self) {
        for lane in &mut self.lanes {
            lane.state.is_done = false;
            lane.state.is_swept_in_look = false;
        }
    }

    /// Every lane may have something again, behind its place.
    pub(super) fn ask_again(&mut self) {
        for lane in &mut self.lanes {
            lane.state.is_done = false;
        }
    }

    /// Messages may stand before the place of any lane.
    pub(super) fn forget_places(&mut self) {
        for lane in &mut self.lanes {
            lane.state.swept = None;
            lane.state.is_done = false;
        }
    }

    /// A claim of these took too long. Where it was a sweep, there is none for a while; otherwise too much
    /// is dead behind the place: what stands there is left to the patrol.
    pub(super) fn were_too_slow(&mut self, asked: &[Lane], took: Duration, now: Now) {
        let asked: HashMap<&Stream, &Lane> =
            asked.iter().map(|lane| (&lane.stream, lane)).collect();
        for known in &mut self.lanes {
            let Some(lane) = asked.get(&known.stream) else {
                continue;
            };
            let state = &mut known.state;
            state.swept = Some((now.here, took));
            state.is_swept_in_look = true;
            if lane.after > Position::START {
                state.floor = state.floor.max(now.recently(OVERLAP));
            }
        }
    }

    /// Messages of these topics were given back, the first of them available since then.
    pub(super) fn go_back(&mut self, topics: &HashMap<Topic, i64>) {
        for lane in &mut self.lanes {
            if !lane.stream.is_keyed
                && let Some(available_at) = topics.get(&lane.stream.topic)
            {
                let place = Position::of_time(*available_at);
                lane.state.floor = lane.state.floor.min(place);
                lane.state.first = lane.state.first.min(*available_at);
                lane.state.is_done = false;
            }
        }
    }

    /// Whether there are keyed messages that may be claimed: `is_open` says so for a bulkhead.
    pub(super) fn has_keyed(&self, is_open: impl Fn(To) -> bool) -> bool {
        self.lanes.iter().any(|lane| {
            lane.stream.is_keyed && is_open(lane.to) && !self.kept_back.has(&lane.stream.topic)
        })
    }

    /// Whether there are keyed messages that name a destination.
    pub(super) fn has_keyed_parts(&self) -> bool {
        let names_one = |stream: &Stream| stream.is_keyed && !stream.topic.destination.is_empty();
        self.lanes.iter().any(|lane| names_one(&lane.stream))
    }

    /// When nothing of a registered destination is due that the last look has seen as due later. There may be thousands
    /// that only wait for their next attempts, and what is new comes to them by this relay's own splits or, from other
    /// relays, is seen by the next look. Into other lanes anybody may write at any time.
    fn time_of_early(&self, now: Now) -> i64 {
        let is_recent = |at: Instant| now.here.saturating_duration_since(at) < LOOK_IS_GOOD;
        match self.looked.is_some_and(is_recent) {
            true => now.database.before(now.here, Duration::ZERO),
            false => i64::MAX,
        }
    }

    /// Shares room out, as much as `room_of` says: for a bulkhead, or for messages to be split.
    /// Nothing where no lane is left to be asked. The lanes of a bulkhead may together ask for a
    /// quarter more than its room, and for one message each. `is_asked`: somebody wants to know
    /// whether nothing is due.
    pub(super) fn allot(
        &mut self,
        now: Now,
        room_of: impl Fn(To) -> usize,
        is_asked: bool,
    ) -> Vec<Lane> {
        let count = self.lanes.len();
        if count == 0 {
            return Vec::new();
        }
        for lane in &mut self.lanes {
            let state = &mut lane.state;
            if state.is_done && is_asked && !lane.stream.is_keyed {
                state.is_done = state.is_swept_in_look;
            }
        }
        // Few lanes: another one is first each time. Many: the next ones have their turn.
        let step = if count > MOST_LANES { MOST_LANES } else { 1 };
        self.turn = (self.turn + step) % count;
        let early = self.time_of_early(now);
        let in_turn = (0..count).map(|n| &self.lanes[(self.turn + n) % count]);
        let (left, done): (Vec<&Known>, Vec<&Known>) = in_turn
            .filter(|lane| is_asked || !lane.is_of_registered() || lane.state.first <= early)
            .filter(|lane| !self.kept_back.has(&lane.stream.topic))
            .filter(|lane| room_of(lane.to) > 0)
            .partition(|lane| !lane.state.is_done);
        if left.is_empty() {
            return Vec::new();
        }
        // No more lanes than there is room for: each gives one message at least.
        let mut lanes_of: HashMap<To, usize> = HashMap::new();
        let (quiet, busy): (Vec<&Known>, Vec<&Known>) = left
            .into_iter()
            .chain(done)
            .filter(|lane| {
                let lanes = lanes_of.entry(lane.to.group()).or_default();
                *lanes += 1;
                *lanes <= room_of(lane.to.group())
            })
            .take(MOST_LANES)
            .partition(|lane| lane.state.is_quiet);
        let mut shares: HashMap<To, (usize, usize)> = HashMap::new();
        for lane in &quiet {
            shares.entry(lane.to.group()).or_default().0 += 1;
        }
        for lane in &busy {
            shares.entry(lane.to.group()).or_default().1 += 1;
        }
        let lane = |known: &Known, room: usize| {
            let is_sweep = known
                .state
                .is_sweep_due(now.here, known.stream.is_keyed, is_asked);
            Lane {
                stream: known.stream.clone(),
                room: room.min(room_of(known.to)).max(1),
                after: if is_sweep {
                    Position::START
                } else {
                    known.state.floor
                },
            }
        };
        let quiet = quiet.into_iter().map(|known| {
            let (quiet, _) = shares[&known.to.group()];
            lane(
                known,
                (room_of(known.to.group()) / 4).min(QUIET_ROOM) / quiet.max(1),
            )
        });
        let busy = busy.into_iter().map(|known| {
            let (_, busy) = shares[&known.to.group()];
            lane(known, room_of(known.to.group()) / busy.max(1))
        });
        quiet.chain(busy).collect()
    }

    /// When the first of the sweeps may be made that this look, which `began` then, has left out. What it could
    /// have made at once there was no room for, and no time makes room.
    pub(super) fn owed_at(&self, began: Instant, is_open: impl Fn(To) -> bool) -> Option<Instant> {
        let is_claimed =
            |lane: &&Known| is_open(lane.to) && !self.kept_back.has(&lane.stream.topic);
        let lanes = self.lanes.iter().filter(is_claimed);
        let owed = lanes.filter_map(|lane| lane.state.owed_at());
        owed.filter(|at| *at >= began).min()
    }

    /// Learns from a claim which of the lanes that it asked have more, and where they go on.
    pub(super) fn learn(&mut self, brought: &Brought<'_>, now: Now) {
        type Found = (usize, Option<Position>);
        let mut found: HashMap<(&str, &str), Found> = HashMap::new();
        let is_plain = |one: &&Claimed| one.message.ordering_key.is_none();
        for one in brought.batch.claimed.iter().filter(is_plain) {
            let message = &one.message;
            let of_lane = found
                .entry((&message.topic, &message.destination))
                .or_default();
            of_lane.0 += 1;
            of_lane.1 = of_lane.1.max(Some(one.position));
        }
        let asked = brought.asked.iter().map(|lane| (&lane.stream, lane));
        let asked: HashMap<&Stream, &Lane> = asked.collect();
        for known in &mut self.lanes {
            let Some(lane) = asked.get(&known.stream) else {
                continue;
            };
            let Topic { topic, destination } = &known.stream.topic;
            let is_keyed = known.stream.is_keyed;
            let (is_full, last) = if is_keyed {
                let reached = brought.reached.get(&known.stream).copied();
                // What was left of a cut batch stands before that place.
                let reached = reached.filter(|_| !brought.batch.is_cut);
                (reached.is_some(), reached)
            } else {
                let of_lane = found.get(&(topic.as_str(), destination.as_str()));
                let (count, last) = of_lane.copied().unwrap_or_default();
                if count > 0 {
                    known.state.seen = now.here;
                }
                (count >= lane.room, last)
            };
            let state = &mut known.state;
            state.learn(is_keyed, lane.after, is_full, last, brought, now);
        }
    }

    /// Whether some lane is left to be asked whose messages are not kept back: `is_open` says so
    /// for a bulkhead.
    pub(super) fn is_anything_left(&self, now: Now, is_open: impl Fn(To) -> bool) -> bool {
        let early = self.time_of_early(now);
        self.lanes.iter().any(|lane| {
            let is_due = !lane.is_of_registered() || lane.state.first <= early;
            let is_kept_back = || self.kept_back.has(&lane.stream.topic);
            !lane.state.is_done && is_due && is_open(lane.to) && !is_kept_back()
        })
    }
}

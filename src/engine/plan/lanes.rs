//! The lanes: how a claim shares room between topics, and where the next claim of each topic starts.
//!
//! A lane is a stream (the messages of one topic and destination, with or without a key) and its floor: the index
//! position after which the next claim starts. A sweep is a claim from the start instead.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::contention::OfKeys;
use super::database_clock::Now;
use super::kept_back::KeptBack;
use super::pace::{LastTwo, Pace};
use super::to::{Group, To};
use crate::engine::claim::sql::claim::{Batch, Claimed, Lane, Position, Stream, Topic};
use crate::engine::claim::sql::streams::FoundStream;
use crate::engine::send::bulkhead::MOST_LANES;

/// A claim that empties a lane puts the floor this far before the claim began. Messages that were available earlier
/// were most likely committed in time; [`Late`](super::late::Late) finds the others.
const OVERLAP: Duration = Duration::from_millis(50);
/// The pace of the sweeps of a lane.
const SWEEPS: Pace = Pace::of_search(Duration::from_secs(1));

/// How long the due times that a query for all streams has found remain usable.
const LOOK_IS_GOOD: Duration = Duration::from_secs(2);

/// The most messages that all quiet lanes of a group are asked for together. A claim of so few messages is one
/// statement, because they always fit. A lane that has more messages becomes busy.
const QUIET_ROOM: usize = 15;

/// An empty lane is kept this long, so that a new message of the topic need not wait for the next survey. Under load,
/// surveys are 100 ms apart, and often find a topic empty because its messages are delivered at once.
const EMPTY_KEPT: Duration = Duration::from_secs(10);

/// With more lanes than this, a query for streams is slow because of their number, and each claim reads them all: empty
/// lanes are not kept.
// Why: docs/decisions.md#empty-lanes
const MOST_KEPT: usize = 1000;

/// The streams of live messages, and their state.
///
/// A look (a pass over all lanes) asks every lane until it has no more messages. A busy lane returned all it was asked
/// for last time; the busy lanes of a bulkhead share its room. Quiet lanes come first, with a little room each, so
/// that their messages never wait behind the backlog of another topic.
///
/// The next claim of a lane starts where the last claim ended. So it does not read again the index entries of settled
/// messages, which an old snapshot may keep for hours. Messages below that floor were committed late, released, or
/// left by a crashed relay: a sweep finds them. A sweep of a keyed lane reads only the first messages. The
/// [`Walk`](super::walk::Walk) finds the rest: a due message may come after many waiting messages of other keys.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: Vec<LaneState>,
    /// What was kept back at the last claim.
    pub(super) kept_back: Arc<KeptBack>,
    /// The number of claims so far.
    turn: usize,
    /// Whether lanes that were never asked come first, if there are too many for one claim.
    prefers_new: bool,
    /// The places of the lanes that were allotted last.
    allotted: Vec<usize>,
    /// When the last query for all streams reported their first messages.
    looked: Option<Instant>,
}

#[derive(Debug)]
struct LaneState {
    stream: Stream,
    to: To,
    /// The last claim returned fewer messages than it asked for.
    is_quiet: bool,
    /// This look has found no more messages in the lane.
    is_done: bool,
    /// The position after which the next claim starts.
    floor: Position,
    /// Whether a claim has asked the lane.
    is_asked: bool,
    /// The number of the last claim that was to ask the lane; of a new lane, of the claim before it. The lowest number comes
    /// first.
    turn: usize,
    /// The last sweeps.
    swept: LastTwo,
    is_swept_in_look: bool,
    /// When the first message is due, by the last query for streams and by releases since.
    first: i64,
    /// When a survey or a claim last found a message.
    seen: Instant,
}

/// The result of a query for streams.
#[derive(Debug, Default)]
pub(super) struct SeenStreams {
    pub(super) found: Vec<FoundStream>,
    /// Whether `found` has every stream with messages. Otherwise it lacks the known streams.
    pub(super) is_all: bool,
    /// How long the query took, if that is too long: dead index entries come before the first live ones, and a sweep
    /// would only read them again.
    pub(super) slow: Option<Duration>,
}

/// The result of a claim from some lanes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Brought<'a> {
    /// The most messages that the claim could return.
    pub(crate) room: usize,
    /// Empty if another relay was claiming keyed messages.
    pub(crate) batch: &'a Batch,
    pub(crate) of_keys: OfKeys,
    /// For keyed lanes that have more messages: where the claim stopped reading.
    pub(crate) reached: &'a HashMap<Stream, Position>,
    pub(crate) took: Duration,
}

impl Brought<'_> {
    /// Whether the claim reached its limit, so that it may not have read the last lanes.
    fn is_cut(&self) -> bool {
        self.batch.is_cut || self.batch.claimed.len() >= self.room
    }
}

impl LaneState {
    /// A newly found stream. The walk claims the keyed messages that already exist.
    fn new(
        FoundStream { stream, first }: FoundStream,
        to: To,
        now: Now,
        slow: Option<Duration>,
        turn: usize,
    ) -> Self {
        let first = first.available_at;
        let floor = match (stream.is_keyed, slow) {
            (true, _) => now.recently(OVERLAP),
            (false, None) => Position::START,
            // The found message may be due later than messages committed since.
            (false, Some(_)) => Position::of_time(first).min(now.recently(OVERLAP)),
        };
        Self {
            stream,
            to,
            is_quiet: false,
            is_done: false,
            floor,
            is_asked: false,
            turn,
            swept: slow.map_or_else(LastTwo::default, |took| LastTwo::slow(now.last(took))),
            is_swept_in_look: false,
            first,
            seen: now.here,
        }
    }

    /// Whether the next claim is a sweep. `is_asked`: a caller asks whether nothing is left. For keyed messages, the
    /// walk answers that question.
    fn is_sweep_due(&self, now: Instant, is_asked: bool) -> bool {
        let may_be_wanted = is_asked && !self.stream.is_keyed;
        (may_be_wanted && self.is_quiet && !self.is_swept_in_look)
            || SWEEPS.is_due(now, self.swept.last())
    }

    /// The time of the sweep that this look has left out. No notification announces the messages that only a sweep
    /// finds.
    fn owed_at(&self) -> Option<Instant> {
        let last = self.swept.last().filter(|_| !self.is_swept_in_look)?;
        Some(SWEEPS.next(last))
    }

    /// Learns from a claim after the position `after`, which ended at `last`. `is_full`: the claim got all it asked
    /// for.
    fn learn(
        &mut self,
        after: Position,
        is_full: bool,
        last: Option<Position>,
        brought: &Brought<'_>,
        now: Now,
    ) {
        if brought.is_cut() && !is_full {
            self.turn = 0;
            return;
        }
        let is_sweep = after == Position::START;
        if is_sweep {
            self.swept.add(now.last(brought.took));
        }
        if is_sweep && self.stream.is_keyed && is_full {
            // Many messages wait here behind others of their key, or there is too little room: the walk finds them.
            self.is_swept_in_look = true;
            return;
        }
        if is_full {
            self.floor = last.unwrap_or(self.floor);
            self.is_quiet = false;
            return;
        }
        // Measured from the start of the claim, which has not seen later commits.
        let recent = now.recently(OVERLAP + brought.took);
        self.is_quiet = true;
        self.floor = recent;
        self.is_swept_in_look |= is_sweep;
        // The lane is empty after the last position. Just before it, a message may have been committed late.
        self.is_done = is_sweep || after <= recent;
    }

    fn is_of_member(&self) -> bool {
        matches!(self.to, To::Member(_) | To::Feed(_)) && !self.stream.is_keyed
    }

    fn is_due(&self, early: i64) -> bool {
        !self.is_of_member() || self.first <= early
    }
}

/// Lets tenants take turns: first a lane of each, then a second one. A lane of no tenant has a turn of its own. `new_first`:
/// in each turn, lanes come first that were never asked: the others may be thousands that have become empty.
fn take_turns(lanes: &mut Vec<Numbered<'_>>, tenant: impl Fn(To) -> Option<Uuid>, new_first: bool) {
    let mut before: HashMap<Uuid, usize> = HashMap::new();
    let of_turn = |(_, lane): &Numbered<'_>| {
        tenant(lane.to).map_or(1, |tenant| {
            let before = before.entry(tenant).or_default();
            *before += 1;
            *before
        })
    };
    let turns: Vec<usize> = lanes.iter().map(of_turn).collect();
    let mut in_turn: Vec<(usize, Numbered<'_>)> = turns.into_iter().zip(lanes.drain(..)).collect();
    // While others claim keyed messages, those lanes are left out later.
    let is_known = |lane: &LaneState| lane.is_asked || lane.stream.is_keyed;
    in_turn.sort_by_key(|(turn, (_, lane))| (*turn, new_first && is_known(lane)));
    lanes.extend(in_turn.into_iter().map(|(_, lane)| lane));
}

/// A lane, and its place among all lanes.
type Numbered<'a> = (usize, &'a LaneState);

impl Lanes {
    /// Takes in the streams that were found: all, or all but the known streams. New lanes count as busy and not yet
    /// asked.
    ///
    /// Lanes that have become empty are kept for a while. After a slow query they are kept longer: otherwise the next
    /// query that skips known streams would read their dead entries and be slow, too.
    ///
    /// Returns `true` if new lanes include topics that this relay does not serve.
    pub(super) fn take_over(
        &mut self,
        seen: SeenStreams,
        way: impl Fn(&Topic) -> To,
        now: Now,
    ) -> bool {
        // Two lanes of one stream would claim its messages twice. The first message of a stream counts.
        let found = seen.found.into_iter().rev();
        let mut found: BTreeMap<Stream, Position> =
            found.map(|found| (found.stream, found.first)).collect();
        if seen.is_all {
            self.looked = Some(now.here);
            let keeps_empty = self.lanes.len() <= MOST_KEPT;
            self.lanes.retain_mut(|lane| {
                if let Some(first) = found.get(&lane.stream) {
                    (lane.seen, lane.first) = (now.here, first.available_at);
                    return true;
                }
                let is_recent = now.here.saturating_duration_since(lane.seen) < EMPTY_KEPT;
                keeps_empty && (seen.slow.is_some() || is_recent && !lane.is_of_member())
            });
        }
        for lane in &self.lanes {
            found.remove(&lane.stream);
        }
        let before = self.lanes.len();
        self.lanes.extend(found.into_iter().map(|(stream, first)| {
            let to = way(&stream.topic);
            LaneState::new(FoundStream { stream, first }, to, now, seen.slow, self.turn)
        }));
        (self.lanes[before..].iter()).any(|lane| lane.to == To::Nowhere)
    }

    /// Updates the ways of all lanes. Returns `true` if some have changed; these lanes must be asked again.
    pub(super) fn go_elsewhere(&mut self, way: impl Fn(&Topic) -> To) -> bool {
        let mut any = false;
        for lane in &mut self.lanes {
            let to = way(&lane.stream.topic);
            if std::mem::replace(&mut lane.to, to) != to {
                lane.is_done = false;
                any = true;
            }
        }
        any
    }

    /// Topics that this relay does not serve, of messages that name no destination.
    pub(super) fn nowhere(&self) -> impl Iterator<Item = String> {
        let is_it =
            |lane: &&LaneState| lane.to == To::Nowhere && lane.stream.topic.destination.is_empty();
        let nowhere = self.lanes.iter().filter(is_it);
        nowhere.map(|lane| lane.stream.topic.topic.clone())
    }

    /// The highest floor of all lanes.
    pub(super) fn passed(&self) -> Option<Position> {
        self.lanes.iter().map(|lane| lane.floor).max()
    }

    /// Whether the floor of the message's lane has passed this position.
    pub(super) fn has_passed(&self, place: &FoundStream) -> bool {
        let lane = (self.lanes.iter()).find(|lane| lane.stream == place.stream);
        lane.is_some_and(|lane| lane.floor > place.first)
    }

    pub(super) fn destinations(&self) -> impl Iterator<Item = &str> {
        self.lanes
            .iter()
            .map(|lane| &*lane.stream.topic.destination)
    }

    pub(super) fn streams(&self) -> Vec<Stream> {
        self.lanes.iter().map(|lane| lane.stream.clone()).collect()
    }

    /// Sets what must not be claimed. Returns `true` if something is no longer kept back.
    pub(super) fn keep_back(&mut self, kept_back: &Arc<KeptBack>) -> bool {
        let before = std::mem::replace(&mut self.kept_back, Arc::clone(kept_back));
        !Arc::ptr_eq(&before, kept_back) && kept_back.frees(&before)
    }

    /// Starts a look: every lane may have messages again.
    pub(super) fn begin_look(&mut self) {
        for lane in &mut self.lanes {
            lane.is_done = false;
            lane.is_swept_in_look = false;
        }
    }

    /// Every lane may have messages again, after its floor.
    pub(super) fn ask_again(&mut self) {
        for lane in &mut self.lanes {
            lane.is_done = false;
        }
    }

    /// Any lane may have messages below its floor: the next claim of each lane is a sweep.
    pub(super) fn forget_places(&mut self) {
        for lane in &mut self.lanes {
            lane.swept = LastTwo::default();
            lane.is_done = false;
        }
    }

    /// A claim from these lanes took too long, and sweeps pause. If the claim was no sweep, too many dead entries come
    /// after the floor: the floor skips them, and the patrol finds the messages in between.
    pub(super) fn were_too_slow(&mut self, asked: &[Lane], took: Duration, now: Now) {
        let asked: HashMap<&Stream, &Lane> =
            asked.iter().map(|lane| (&lane.stream, lane)).collect();
        for state in &mut self.lanes {
            let Some(lane) = asked.get(&state.stream) else {
                continue;
            };
            state.is_asked = true;
            state.swept = LastTwo::slow(now.last(took));
            state.is_swept_in_look = true;
            if lane.after > Position::START {
                state.floor = state.floor.max(now.recently(OVERLAP));
            }
        }
    }

    /// Messages of these topics were released. The value is the time from which the first is available.
    /// A topic may have no lane any more.
    pub(super) fn go_back(
        &mut self,
        topics: &HashMap<Topic, i64>,
        way: impl Fn(&Topic) -> To,
        looked: Instant,
    ) {
        let mut without: BTreeSet<&Topic> = topics.keys().collect();
        for lane in &mut self.lanes {
            if !lane.stream.is_keyed
                && let Some(available_at) = topics.get(&lane.stream.topic)
            {
                let place = Position::of_time(*available_at);
                lane.floor = lane.floor.min(place);
                lane.first = lane.first.min(*available_at);
                lane.is_done = false;
                without.remove(&lane.stream.topic);
            }
        }
        let looked = Now::new(looked, None);
        self.lanes.extend(without.into_iter().map(|topic| {
            let stream = Stream {
                topic: topic.clone(),
                is_keyed: false,
            };
            let first = Position::of_time(topics[topic]);
            LaneState::new(
                FoundStream { stream, first },
                way(topic),
                looked,
                None,
                self.turn,
            )
        }));
    }

    /// Whether some keyed lane may be claimed from. `is_open`: whether its destination takes messages.
    pub(super) fn has_keyed(&self, is_open: impl Fn(To) -> bool) -> bool {
        let mut keyed = self.claimable(|lane| lane.stream.is_keyed && is_open(lane.to));
        keyed.next().is_some()
    }

    /// Whether some keyed messages name a destination.
    pub(super) fn has_keyed_parts(&self) -> bool {
        let names_one = |stream: &Stream| stream.is_keyed && !stream.topic.destination.is_empty();
        self.lanes.iter().any(|lane| names_one(&lane.stream))
    }

    /// Lanes of members whose first message is due after this time are not asked. There may be
    /// thousands of such lanes, all waiting for their next attempt. Only fan-outs add messages to these lanes: this
    /// relay knows its own, and the next query for streams finds those of other relays. Applications write to other
    /// lanes at any time.
    fn time_of_early(&self, now: Now) -> i64 {
        let is_recent = |at: Instant| now.here.saturating_duration_since(at) < LOOK_IS_GOOD;
        match self.looked.is_some_and(is_recent) {
            true => now.database,
            false => i64::MAX,
        }
    }

    /// Shares the room of each way between its lanes. Returns the lanes to claim from, or none if every
    /// lane was asked in this look. The lanes of a bulkhead may together ask for a quarter more than its room, and for
    /// at least one message each. `tenant`: whose destination it is. `is_asked`: a caller asks whether nothing is due.
    pub(super) fn allot(
        &mut self,
        now: Now,
        room: impl Fn(Group) -> usize,
        tenant: impl Fn(To) -> Option<Uuid>,
        is_asked: bool,
    ) -> Vec<Lane> {
        if is_asked {
            for lane in self.lanes.iter_mut().filter(|lane| lane.is_done) {
                lane.is_done = lane.is_swept_in_look || lane.stream.is_keyed;
            }
        }
        let room_of = |lane: &LaneState| room(Group::Only(lane.to));
        let shared_by = |lane: &LaneState| room(lane.to.group());
        let early = self.time_of_early(now);
        let may_have_some =
            |lane: &LaneState| (is_asked || lane.is_due(early)) && room_of(lane) > 0;
        let (mut left, mut done): (Vec<Numbered<'_>>, Vec<Numbered<'_>>) = self
            .claimable(may_have_some)
            .partition(|(_, lane)| !lane.is_done);
        if left.is_empty() {
            self.allotted = Vec::new();
            return Vec::new();
        }
        left.sort_by_cached_key(|(_, lane)| lane.turn);
        let first = self.turn % done.len().max(1);
        done.rotate_left(first);
        if left.len() > MOST_LANES {
            // Every other time: new lanes may come without end.
            take_turns(&mut left, tenant, self.prefers_new);
        }
        // The lanes of each group: the quiet ones, and the busy ones. No more lanes than messages fit: each lane is asked
        // for at least one message.
        let mut of_group: HashMap<Group, [usize; 2]> = HashMap::new();
        let has_share = |(_, lane): &Numbered<'_>| {
            let counts = of_group.entry(lane.to.group()).or_default();
            let has_share = counts.iter().sum::<usize>() < shared_by(lane);
            counts[usize::from(!lane.is_quiet)] += usize::from(has_share);
            has_share
        };
        let mut asked: Vec<Numbered<'_>> = (left.into_iter().chain(done))
            .filter(has_share)
            .take(MOST_LANES)
            .collect();
        asked.sort_by_key(|(_, lane)| !lane.is_quiet);
        let lane = |(_, lane): &Numbered<'_>| {
            let [quiet, busy] = of_group[&lane.to.group()];
            let room = match lane.is_quiet {
                true => (shared_by(lane) / 4).min(QUIET_ROOM) / quiet,
                false => shared_by(lane) / busy,
            };
            Lane {
                stream: lane.stream.clone(),
                room: room.min(room_of(lane)).max(1),
                after: match lane.is_sweep_due(now.here, is_asked) {
                    true => Position::START,
                    false => lane.floor,
                },
            }
        };
        let lanes = asked.iter().map(lane).collect();
        self.allotted = asked.into_iter().map(|(at, _)| at).collect();
        lanes
    }

    /// The lanes that were allotted last are claimed from now: the others come first in the next turn.
    pub(super) fn end_turn(&mut self) {
        self.turn += 1;
        self.prefers_new = !self.prefers_new;
        for at in self.allotted.drain(..) {
            self.lanes[at].turn = self.turn;
        }
    }

    /// Those of these lanes that are not kept back, each with its place.
    fn claimable(&self, which: impl Fn(&LaneState) -> bool) -> impl Iterator<Item = Numbered<'_>> {
        let is_kept_back = |lane: &LaneState| self.kept_back.has(&lane.stream.topic);
        let all = self.lanes.iter().enumerate();
        all.filter(move |(_, lane)| which(lane) && !is_kept_back(lane))
    }

    /// The time of the first sweep that this look, started at `began`, has left out. A sweep that was possible at once
    /// was left out for want of room, and waiting does not make room.
    pub(super) fn owed_at(&self, began: Instant, is_open: impl Fn(To) -> bool) -> Option<Instant> {
        let lanes = self.claimable(|lane| is_open(lane.to));
        let owed = lanes.filter_map(|(_, lane)| lane.owed_at());
        owed.filter(|at| *at >= began).min()
    }

    /// Learns from a claim which lanes have more messages, and where their next claims start.
    pub(super) fn learn(&mut self, asked: &[Lane], brought: &Brought<'_>, now: Now) {
        type FoundAt = (usize, Option<Position>);
        let mut found: HashMap<(&str, &str), FoundAt> = HashMap::new();
        let is_plain = |one: &&Claimed| one.message.ordering_key.is_none();
        for one in brought.batch.claimed.iter().filter(is_plain) {
            let message = &one.message;
            let of_lane = found
                .entry((&message.topic, &message.destination))
                .or_default();
            of_lane.0 += 1;
            of_lane.1 = of_lane.1.max(Some(one.position));
        }
        let asked = asked.iter().map(|lane| (&lane.stream, lane));
        let asked: HashMap<&Stream, &Lane> = asked.collect();
        let keeps_empty = self.lanes.len() <= MOST_KEPT;
        self.lanes.retain_mut(|known| {
            let Some(lane) = asked.get(&known.stream) else {
                return true;
            };
            let Topic { topic, destination } = &known.stream.topic;
            let (is_full, last) = if known.stream.is_keyed {
                let reached = brought.reached.get(&known.stream).copied();
                // The messages left out of a cut batch come before that position.
                let reached = reached.filter(|_| !brought.batch.is_cut);
                (reached.is_some(), reached)
            } else {
                let of_lane = found.get(&(topic.as_str(), destination.as_str()));
                let (count, last) = of_lane.copied().unwrap_or_default();
                if count > 0 {
                    known.seen = now.here;
                }
                (count >= lane.room, last)
            };
            known.is_asked = true;
            known.learn(lane.after, is_full, last, brought, now);
            let is_empty = !known.stream.is_keyed
                && known.is_swept_in_look
                && known.is_done
                && known.first <= now.database;
            keeps_empty || !is_empty
        });
    }

    /// Whether some lane is still to be asked in this look. `is_open`: whether its destination takes messages.
    pub(super) fn is_anything_left(&self, now: Now, is_open: impl Fn(To) -> bool) -> bool {
        let early = self.time_of_early(now);
        let is_left = |lane: &LaneState| !lane.is_done && lane.is_due(early) && is_open(lane.to);
        self.claimable(is_left).next().is_some()
    }
}

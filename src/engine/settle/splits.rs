//! Fan-outs, piece by piece: a message may have thousands of destinations, and the results of other messages must not
//! wait for it. A piece is one transaction, and the settler records other results between two pieces.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::Settler;
use super::settlement::Settlement;
use super::sql::split::Piece;
use crate::clock;
use crate::engine::host::database::Database;

/// A tenant keeps only as many messages here as need this long, by the experience of the last piece, and at least [`LEAST`].
/// More of them would keep the messages of other tenants from being claimed.
const MOST_TIME: Duration = Duration::from_secs(2);
const LEAST: usize = 8;
/// A message that needs less than this is kept in any case.
const SMALL: Duration = Duration::from_millis(20);
/// A message that a tenant cannot keep waits at most as long as it has waited, within these limits: the relay may have become
/// faster meanwhile.
const WAITS: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(300));
/// Why such a message waits.
const TOO_MANY: &str = "this tenant has more messages to fan out than the relay places in 2 s: the message waits for its turn, so that those of other tenants are claimed";

/// How long a piece should take: the next piece is smaller after a slower piece, and larger after a faster one.
const SLOW: Duration = Duration::from_millis(250);
const FAST: Duration = Duration::from_millis(100);

/// The messages to be fanned out.
#[derive(Debug)]
pub(super) struct Splits {
    waiting: Vec<Settlement>,
    /// The messages that are put off, because their tenants have too many here.
    surplus: Vec<Settlement>,
    /// How long the last piece took for a part.
    each: Duration,
    /// The most of a piece, and the size of the next piece.
    most: Piece,
    piece: Piece,
    /// The tenants whose messages wait, in the order of their turns.
    turns: VecDeque<SplitTurn>,
    /// After an error: no piece before this time.
    rests_until: Option<Instant>,
}

/// A tenant's next piece: tenants take turns, so that nobody waits for the fan-outs of another tenant.
#[derive(Debug, Clone, Copy)]
struct SplitTurn {
    tenant: Option<Uuid>,
    /// Whether the next piece is for the messages that need the fewest parts. These and the oldest messages take turns:
    /// a message for two destinations does not wait for messages for thousands, and each message has its turn.
    is_of_small: bool,
    /// When the messages would be done that the tenant has, or that wait for their turn in the table.
    booked: Instant,
}

impl Splits {
    pub(super) fn new(most: Piece) -> Self {
        Self {
            waiting: Vec::new(),
            surplus: Vec::new(),
            each: Duration::ZERO,
            most,
            piece: most,
            turns: VecDeque::new(),
            rests_until: None,
        }
    }

    pub(super) fn add(&mut self, settlement: Settlement) {
        let tenant = settlement.message.tenant_id;
        if self.turns.iter().all(|turn| turn.tenant != tenant) {
            self.turns.push_back(SplitTurn {
                tenant,
                is_of_small: true,
                booked: clock::now(),
            });
        }
        self.waiting.push(settlement);
    }

    pub(super) fn piece(&self) -> Piece {
        self.piece
    }

    /// When the next piece is due, if a message waits.
    pub(super) fn next_piece(&self, now: Instant) -> Option<Instant> {
        let next = self.rests_until.map_or(now, |until| until.max(now));
        let has_work = !self.waiting.is_empty() || !self.surplus.is_empty();
        has_work.then_some(next)
    }

    /// Another relay continues these fan-outs.
    pub(super) fn release(&mut self) -> Vec<Settlement> {
        let waiting = std::mem::take(&mut self.waiting).into_iter();
        let all = waiting.chain(std::mem::take(&mut self.surplus));
        all.map(Settlement::release).collect()
    }

    /// Puts off what tenants cannot keep here, each message until its turn comes.
    fn put_surplus_off(&mut self, now: Instant) {
        let mut kept: HashMap<Option<Uuid>, (usize, Duration)> = HashMap::new();
        let mut all = std::mem::take(&mut self.waiting);
        all.sort_by_key(Settlement::sequence);
        for one in all {
            let tenant = one.message.tenant_id;
            let needs = self.needs(one.unplaced().len());
            let (count, time) = kept.entry(tenant).or_default();
            let has_place = *count < LEAST || *time < MOST_TIME;
            if has_place || needs < SMALL || one.is_begun() {
                (*count, *time) = (*count + 1, *time + needs);
                self.waiting.push(one);
                continue;
            }
            let turn = self.turns.iter_mut().find(|turn| turn.tenant == tenant);
            let wait = turn.map_or(WAITS.0, |turn| turn.book(&one, needs, now, now + *time));
            self.surplus.push(one.put_off(TOO_MANY, wait));
        }
    }

    fn needs(&self, parts: usize) -> Duration {
        self.each
            .saturating_mul(u32::try_from(parts).unwrap_or(u32::MAX))
    }

    /// Notes how long a piece took.
    pub(super) fn took(&mut self, took: Duration) {
        let Piece { parts, bytes } = self.piece;
        if took > SLOW {
            self.shrink();
        } else if took < FAST {
            self.piece = Piece {
                parts: parts.saturating_mul(2).min(self.most.parts),
                bytes: bytes.saturating_mul(2).min(self.most.bytes),
            };
        }
    }

    fn shrink(&mut self) {
        self.piece = Piece {
            parts: (self.piece.parts / 2).max(1),
            bytes: (self.piece.bytes / 2).max(1),
        };
    }

    /// Takes messages of one lease, each sequence at most once, that together have work for a piece, in the order of their
    /// turns.
    fn take_next(&mut self) -> Vec<Settlement> {
        let all = self.take_in_turns();
        let lease = all.first().map(|one| one.lease);
        let (mut sequences, mut parts) = (HashSet::new(), 0);
        let is_next = |one: &Settlement| {
            let is_next = parts < self.piece.parts
                && sequences.len() < self.most.parts
                && Some(one.lease) == lease
                && sequences.insert(one.sequence());
            if is_next {
                parts += one.unplaced().len();
            }
            is_next
        };
        let (next, others) = all.into_iter().partition(is_next);
        self.waiting = others;
        next
    }

    /// Takes the waiting messages in the order of their turns: the first of each tenant, then the second of each, and so
    /// on. Gives the first tenant its turn.
    fn take_in_turns(&mut self) -> Vec<Settlement> {
        let mut of_tenant: HashMap<Option<Uuid>, Vec<Settlement>> = HashMap::new();
        for one in std::mem::take(&mut self.waiting) {
            let own = of_tenant.entry(one.message.tenant_id).or_default();
            own.push(one);
        }
        self.turns
            .retain(|turn| of_tenant.contains_key(&turn.tenant));
        let mut order = Vec::new();
        for (place, turn) in (0..).zip(&self.turns) {
            let mut own = of_tenant.remove(&turn.tenant).unwrap_or_default();
            own.sort_by_key(Settlement::sequence);
            if turn.is_of_small {
                own.sort_by_key(|one| one.unplaced().len());
            }
            order.extend((0..).zip(own).map(|(round, one)| ((round, place), one)));
        }
        if let Some(turn) = self.turns.pop_front() {
            self.turns.push_back(SplitTurn {
                is_of_small: !turn.is_of_small,
                ..turn
            });
        }
        order.sort_unstable_by_key(|(turn, _): &((usize, usize), Settlement)| *turn);
        order.into_iter().map(|(_, one)| one).collect()
    }
}

impl SplitTurn {
    /// How long a message is put off that needs this long: until those before it are done, of which some are here, which
    /// are done at `done`.
    fn book(&mut self, one: &Settlement, needs: Duration, now: Instant, done: Instant) -> Duration {
        let message = &one.message;
        let age = message.time_of(now).duration_since(message.created_at);
        let most = age.unwrap_or_default().clamp(WAITS.0, WAITS.1);
        self.booked = self.booked.max(done);
        let wait = self.booked.saturating_duration_since(now);
        if wait > most {
            return most.mul_f64(0.5 + fastrand::f64() / 2.0);
        }
        self.booked += needs.min(WAITS.1);
        wait
    }
}

impl<D: Database> Settler<'_, D> {
    /// Does a piece of the fan-outs, if a piece is due.
    pub(super) fn split_next(&mut self) {
        let now = clock::now();
        if self.splits.next_piece(now).is_none_or(|at| at > now) {
            return;
        }
        let group = self.splits.take_next();
        let mut group = self.without_locked(group);
        let parts =
            |all: &[Settlement]| -> usize { all.iter().map(|one| one.unplaced().len()).sum() };
        let before = parts(&group);
        let left = match self.settle_group(&mut group) {
            Ok(()) => {
                self.splits.rests_until = None;
                let placed = before.saturating_sub(parts(&group));
                let placed = u32::try_from(placed).unwrap_or(u32::MAX);
                let each = clock::since(now).checked_div(placed);
                self.splits.each = each.unwrap_or(self.splits.each);
                group
            }
            Err(error) => {
                // Less work may succeed.
                self.splits.shrink();
                let left = self.was_not_settled(group, &error);
                self.splits.rests_until = Some(clock::now() + self.db.after().wait);
                left
            }
        };
        left.into_iter().for_each(|one| self.splits.add(one));
        let now = clock::now();
        self.splits.put_surplus_off(now);
        let surplus = std::mem::take(&mut self.splits.surplus);
        self.splits.surplus = self.settle(surplus);
        if !self.splits.surplus.is_empty() {
            self.splits.rests_until = Some(clock::now() + self.db.after().wait);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::settlement::tests::fan_out;
    use super::*;

    /// R65: the events of one tenant to a thousand members hold up no message of another tenant.
    #[test]
    fn tenants_take_turns_whatever_the_number_of_their_fan_outs() {
        let piece = Piece {
            parts: 100,
            bytes: usize::MAX,
        };
        let mut splits = Splits::new(piece);
        let tenant = |number| Some(Uuid::from_u128(number));
        (0..200).for_each(|sequence| splits.add(fan_out(sequence, tenant(1), 1_000)));
        for sequence in [200, 300, 400] {
            splits.add(fan_out(sequence, tenant(2), 5));
        }
        let mut first = || {
            let taken = splits.take_next();
            let first = taken.first().map(Settlement::sequence);
            // Nothing of it is placed.
            taken.into_iter().for_each(|one| splits.add(one));
            first
        };
        let turns = [first(), first(), first(), first()];
        assert_eq!(turns[1], Some(200));
        assert_eq!(turns[3], Some(200), "the oldest has its turn, too");
        assert!(
            [turns[0], turns[2]].iter().all(|one| *one < Some(200)),
            "{turns:?}"
        );
    }

    /// R65: more fan-outs than a tenant can keep would keep those of other tenants from being claimed.
    #[test]
    fn a_tenant_keeps_what_two_seconds_are_enough_for_and_the_rest_waits_for_its_turn() {
        let mut splits = Splits::new(Piece::WHOLE);
        let tenant = |number| Some(Uuid::from_u128(number));
        (0..100).for_each(|sequence| splits.add(fan_out(sequence, tenant(1), 1_000)));
        splits.add(fan_out(100, tenant(1), 2));
        splits.add(fan_out(101, tenant(2), 1_000));
        let now = clock::now();
        splits.put_surplus_off(now);
        assert_eq!(splits.waiting.len(), 102, "nothing is known yet");
        splits.each = Duration::from_micros(100);
        splits.put_surplus_off(now);
        let kept: Vec<i64> = splits.waiting.iter().map(Settlement::sequence).collect();
        assert_eq!(kept, (0..20).chain([100, 101]).collect::<Vec<_>>());
        let waits: Vec<Duration> = splits.surplus.iter().map(Settlement::wait).collect();
        assert_eq!(waits.len(), 80);
        // Those behind the first five seconds come back sooner, and are put off again.
        let in_turn = waits.iter().take_while(|wait| **wait <= WAITS.0).count();
        assert!(in_turn >= 30 && waits[..30].is_sorted(), "{waits:?}");
        assert!(
            waits.iter().all(|wait| *wait >= Duration::from_secs(2)),
            "{waits:?}"
        );
        splits.each = Duration::from_secs(1);
        splits.put_surplus_off(now);
        assert_eq!(splits.waiting.len(), LEAST + 1);
    }
}

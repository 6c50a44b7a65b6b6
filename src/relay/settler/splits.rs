//! Fan-outs, piece by piece: a message may have thousands of destinations, and the results of other messages must not
//! wait for it. A piece is one transaction, and the settler records other results between two pieces.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::Settler;
use crate::clock;
use crate::relay::database::Database;
use crate::relay::settlement::{Kind, Settlement};
use crate::store::relay::claim::Topic;
use crate::store::relay::split::Piece;

/// How long a piece should take: the next piece is smaller after a slower piece, and larger after a faster one.
const SLOW: Duration = Duration::from_millis(250);
const FAST: Duration = Duration::from_millis(100);

/// The messages to be fanned out.
#[derive(Debug)]
pub(super) struct Splits {
    waiting: Vec<Settlement>,
    /// The most of a piece, and the size of the next piece.
    most: Piece,
    piece: Piece,
    /// The tenants whose messages wait, in the order of their turns.
    turns: VecDeque<Turn>,
    /// After an error: no piece before this time.
    rests_until: Option<Instant>,
}

/// A tenant's next piece: tenants take turns, so that nobody waits for the fan-outs of another tenant.
#[derive(Debug, Clone, Copy)]
struct Turn {
    tenant: Option<Uuid>,
    /// Whether the next piece is for the messages that need the fewest parts. These and the oldest messages take turns:
    /// a message for two destinations does not wait for messages for thousands, and each message has its turn.
    is_of_small: bool,
}

impl Splits {
    pub(super) fn new(most: Piece) -> Self {
        Self {
            waiting: Vec::new(),
            most,
            piece: most,
            turns: VecDeque::new(),
            rests_until: None,
        }
    }

    pub(super) fn add(&mut self, settlement: Settlement) {
        let tenant = settlement.message.tenant_id;
        if self.turns.iter().all(|turn| turn.tenant != tenant) {
            self.turns.push_back(Turn {
                tenant,
                is_of_small: true,
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
        (!self.waiting.is_empty()).then_some(next)
    }

    /// Another relay continues these fan-outs.
    pub(super) fn release(&mut self) -> Vec<Settlement> {
        let waiting = std::mem::take(&mut self.waiting);
        waiting.into_iter().map(Settlement::release).collect()
    }

    /// Notes how long a settle of this kind took.
    pub(super) fn took(&mut self, kind: Kind, took: Duration) {
        if kind != Kind::Split {
            return;
        }
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
        let order = self.order();
        let Some(lease) = order.first().map(|at| self.waiting[*at].lease) else {
            return Vec::new();
        };
        let (mut sequences, mut taken, mut parts) = (HashSet::new(), Vec::new(), 0);
        for at in order {
            let one = &self.waiting[at];
            if parts >= self.piece.parts || taken.len() >= self.most.parts {
                break;
            }
            if one.lease == lease && sequences.insert(one.sequence()) {
                parts += one.unplaced().len();
                taken.push(at);
            }
        }
        let all = std::mem::take(&mut self.waiting);
        let mut all: Vec<Option<Settlement>> = all.into_iter().map(Some).collect();
        let taken = taken.into_iter().filter_map(|at| all[at].take());
        let taken: Vec<Settlement> = taken.collect();
        self.waiting = all.into_iter().flatten().collect();
        taken
    }

    /// The waiting messages in the order of their turns: the first of each tenant, then the second of each, and so on.
    /// Gives the first tenant its turn.
    fn order(&mut self) -> Vec<usize> {
        let mut of_tenant: HashMap<Option<Uuid>, Vec<usize>> = HashMap::new();
        for (at, one) in (0..).zip(&self.waiting) {
            of_tenant.entry(one.message.tenant_id).or_default().push(at);
        }
        self.turns
            .retain(|turn| of_tenant.contains_key(&turn.tenant));
        let mut order = Vec::new();
        for (place, turn) in (0..).zip(&self.turns) {
            let mut own = of_tenant.remove(&turn.tenant).unwrap_or_default();
            own.sort_by_key(|at| self.waiting[*at].sequence());
            if turn.is_of_small {
                own.sort_by_key(|at| self.waiting[*at].unplaced().len());
            }
            order.extend((0..).zip(own).map(|(round, at)| ((round, place), at)));
        }
        if let Some(Turn {
            tenant,
            is_of_small,
        }) = self.turns.pop_front()
        {
            self.turns.push_back(Turn {
                tenant,
                is_of_small: !is_of_small,
            });
        }
        order.sort_unstable_by_key(|(turn, _): &((usize, usize), usize)| *turn);
        order.into_iter().map(|(_, at)| at).collect()
    }
}

/// The messages of which a piece has placed no part or only some, by sequence, each with the last destination that has
/// its part.
#[derive(Debug, Default)]
pub(super) struct Unfinished(pub(super) BTreeMap<i64, Option<String>>);

impl Unfinished {
    pub(super) fn has(&self, settlement: &Settlement) -> bool {
        self.0.contains_key(&settlement.sequence())
    }

    /// The topics of the parts that are placed now.
    pub(super) fn topics(&self, group: &[Settlement]) -> impl Iterator<Item = (Topic, i64)> {
        let last = |one: &Settlement| self.0.get(&one.sequence())?.as_deref();
        let with_last = |one| Some((one, last(one)?));
        let all: Vec<_> = group.iter().filter_map(with_last).collect();
        all.into_iter()
            .flat_map(|(one, last)| one.topics_up_to(last).collect::<Vec<_>>())
    }

    /// The settlements of these messages, which continue where the piece has ended.
    pub(super) fn of(self, group: Vec<Settlement>) -> Vec<Settlement> {
        let rest = |mut one: Settlement| {
            let last = self.0.get(&one.sequence())?;
            one.place_up_to(last.as_deref());
            Some(one)
        };
        group.into_iter().filter_map(rest).collect()
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
        let left = match self.settle_group(&group) {
            Ok(unfinished) => {
                self.splits.rests_until = None;
                unfinished.of(group)
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::relay::settlement::tests::fan_out;

    /// R65: the events of one tenant to a thousand endpoints hold up no message of another tenant.
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
}

//! Following the ledger.

use std::collections::BTreeSet;
use std::time::{Duration, Instant, SystemTime};

use diesel::PgConnection;

use super::sql::messages::MessageRecord;
use super::sql::tail;
use crate::engine::serves::routes::matches_any;
use crate::error::DatabaseError;
use crate::name::OutboxName;
use crate::operate::sql::place::Place;
use crate::schema::values::as_micros;
use crate::sql::pinned::pinned;

/// The entries that one statement reads.
const PAGE: usize = 1_000;
/// How far each look goes back, for entries that have committed after later ones, in microseconds.
const BACK: i64 = 1_000_000;
/// How far one look in [`FAR_EVERY`] goes back, in microseconds.
const FAR_BACK: i64 = 60_000_000;
const FAR_EVERY: Duration = Duration::from_secs(5);
/// The shortest and the longest time that one statement reads, in microseconds. It is halved when the entries fill a page,
/// and four times as long when they do not: a statement without an end would sort all later entries.
const SHORTEST: i64 = 1_000;
const LONGEST: i64 = 60 * 86_400 * 1_000_000;
/// The entries that are remembered as shown: 5 MB.
const MOST_SHOWN: usize = if cfg!(test) { 2_000 } else { 200_000 };

/// Selects entries of the ledger to follow. All given conditions must hold.
#[derive(Debug, Clone, Default)]
pub struct TailFilter {
    /// Only topics that match one of these patterns; empty: all topics.
    pub topics: Vec<String>,
    /// Only this destination.
    pub destination: Option<String>,
    /// Settled at this time or later. `None`: from now on.
    pub since: Option<SystemTime>,
}

/// Follows the ledger: each entry comes once, in the order in which messages were settled.
///
/// An entry has the time of its settle, and is visible after the commit. So a look does not begin after the latest entry,
/// but a second before it, and every five seconds a minute before it; entries that have come are remembered and left out.
/// An entry that commits later than that is missed. So is one that commits after 200,000 later ones.
#[derive(Debug)]
pub struct Tail {
    filter: TailFilter,
    /// Nothing before this place comes.
    begin: Place,
    /// The latest place that was read.
    latest: Place,
    /// Where the look continues, and where it ends. `None`: it has ended.
    look: Option<(Place, Place)>,
    /// The time that the next statement reads, in microseconds.
    span: i64,
    /// The entries that have come, of the last minute.
    shown: BTreeSet<Place>,
    looked_far: Instant,
}

impl Tail {
    /// # Errors
    /// A [`DatabaseError`].
    pub fn new(conn: &mut PgConnection, filter: TailFilter) -> Result<Self, DatabaseError> {
        let begin = match filter.since {
            Some(since) => Place::before(as_micros(since)),
            None => tail::end(conn)?,
        };
        Ok(Self {
            filter,
            begin,
            latest: begin,
            look: None,
            span: BACK,
            shown: BTreeSet::new(),
            looked_far: Instant::now(),
        })
    }

    /// The next entries. Empty: there are none now.
    ///
    /// # Errors
    /// A [`DatabaseError`]. The next call continues, on this connection or another.
    pub fn next(
        &mut self,
        conn: &mut PgConnection,
        name: &OutboxName,
    ) -> Result<Vec<MessageRecord>, DatabaseError> {
        let (mut place, end) = match self.look {
            Some(look) => look,
            None => (self.from(), tail::end(conn)?),
        };
        while place < end {
            let to = end.min(Place::before(place.micros.saturating_add(self.span)));
            let rows = pinned(conn, name, |conn, name| {
                tail::between(conn, name, (place, to), PAGE as i64)
            })?;
            let last = rows.last().map(MessageRecord::place);
            let is_full = rows.len() == PAGE;
            (place, self.span) = match last.filter(|_| is_full) {
                Some(last) => (last, SHORTEST.max(self.span / 2)),
                None => (to, LONGEST.min(self.span * 4)),
            };
            self.look = Some((place, end));
            self.latest = last.map_or(self.latest, |last| last.max(self.latest));
            let new: Vec<MessageRecord> = rows.into_iter().filter(|row| self.is_new(row)).collect();
            self.forget();
            if !new.is_empty() {
                return Ok(new);
            }
        }
        self.look = None;
        Ok(Vec::new())
    }

    /// Where a look begins.
    fn from(&mut self) -> Place {
        let is_far = self.looked_far.elapsed() >= FAR_EVERY;
        if is_far {
            self.looked_far = Instant::now();
        }
        self.back(if is_far { FAR_BACK } else { BACK })
            .max(self.begin)
    }

    fn back(&self, micros: i64) -> Place {
        Place::before(self.latest.micros.saturating_sub(micros))
    }

    /// Forgets the entries that no look reads again.
    fn forget(&mut self) {
        self.shown = self.shown.split_off(&self.back(FAR_BACK));
        while self.shown.len() > MOST_SHOWN {
            self.begin = self.shown.pop_first().unwrap_or(self.begin).max(self.begin);
        }
    }

    /// Whether an entry is meant and has not come yet.
    fn is_new(&mut self, row: &MessageRecord) -> bool {
        let TailFilter {
            topics,
            destination,
            ..
        } = &self.filter;
        (topics.is_empty() || matches_any(topics, &row.topic))
            && destination.as_ref().is_none_or(|it| *it == row.destination)
            && self.shown.insert(row.place())
    }
}

#[cfg(test)]
mod tests {
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::sql::tests::Outbox;

    /// Adds an entry that was settled `ago` seconds ago.
    fn add(conn: &mut PgConnection, name: &OutboxName, sequence: i64, ago: i64) {
        conn.batch_execute(&format!(
            "INSERT INTO {} (part, sequence, message_id, topic, destination, status, attempts, created_at, settled_at)
             VALUES (0, {sequence}, gen_random_uuid(), 'order.paid', '', 'delivered', 1, now(),
                     now() - {ago} * interval '1 second')",
            name.ledger()
        ))
        .expect("an entry");
    }

    fn all(tail: &mut Tail, conn: &mut PgConnection, name: &OutboxName) -> Vec<i64> {
        let mut all = Vec::new();
        loop {
            match tail.next(conn, name).expect("entries") {
                rows if rows.is_empty() => return all,
                rows => all.extend(rows.iter().map(|row| row.sequence.0)),
            }
        }
    }

    #[test]
    fn an_entry_that_commits_late_comes_once_and_an_older_one_than_the_beginning_never() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        let filter = TailFilter {
            since: SystemTime::now().checked_sub(Duration::from_secs(100)),
            ..TailFilter::default()
        };
        let mut tail = Tail::new(&mut conn, filter).expect("a clock");
        for (sequence, ago) in [(1, 200), (2, 20), (3, 10)] {
            add(&mut conn, name, sequence, ago);
        }
        assert_eq!(all(&mut tail, &mut conn, name), [2, 3]);
        // Two entries have waited for their commits.
        add(&mut conn, name, 4, 30);
        add(&mut conn, name, 5, 150);
        assert_eq!(
            all(&mut tail, &mut conn, name),
            [] as [i64; 0],
            "a short look"
        );
        tail.looked_far = Instant::now().checked_sub(FAR_EVERY).expect("long ago");
        assert_eq!(all(&mut tail, &mut conn, name), [4]);
        add(&mut conn, name, 6, 10);
        assert_eq!(all(&mut tail, &mut conn, name), [6]);
    }

    #[test]
    fn more_entries_than_are_remembered_come_once_each() {
        let outbox = Outbox::new();
        let (mut conn, name) = (outbox.connect(), &outbox.name);
        let mut tail = Tail::new(&mut conn, TailFilter::default()).expect("a clock");
        let most = i64::try_from(MOST_SHOWN).expect("a number") + 5_000;
        conn.batch_execute(&format!(
            "INSERT INTO {} (part, sequence, message_id, topic, destination, status, attempts, created_at)
             SELECT 0, n, gen_random_uuid(), 'order.paid', '', 'delivered', 1, now() FROM generate_series(1, {most}) n",
            name.ledger()
        ))
        .expect("entries");
        let mut come = all(&mut tail, &mut conn, name);
        tail.looked_far = Instant::now().checked_sub(FAR_EVERY).expect("long ago");
        come.extend(all(&mut tail, &mut conn, name));
        assert_eq!(come, (1..=most).collect::<Vec<_>>());
        assert!(tail.shown.len() <= MOST_SHOWN);
    }
}

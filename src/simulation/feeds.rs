//! Feeds of the simulated world: their tables, and readers that read them at any moment, with the product's own pages.

use std::collections::BTreeSet;
use std::time::{Duration, UNIX_EPOCH};

use diesel::result::{Error, QueryResult};
use uuid::Uuid;

use super::broken::Broken;
use super::promises::Promise;
use super::stage::Stage;
use super::tables::{Changes, Tables};
use crate::engine::settle::settlement::{Settlement, delivered};
use crate::engine::settle::written::Settle;
use crate::feed::cursor::{Cursor, Mark};
use crate::feed::page::{self, After, Discontinued, FeedEvent, PageSource};
use crate::feed::sql::read::FeedRow;

/// The most events of a page.
const PAGE: i64 = 5;
/// The moments in which a page is read are at most so far apart, in milliseconds; now and then where something goes wrong.
const STEP: u64 = 3;
const LONGEST_STEP: u64 = 800;
/// At the end, a reader has all events after so many pages.
const LAST_PAGES: usize = 1000;

/// An event of a feed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) position: i64,
    /// The message of the history.
    pub(super) id: usize,
    pub(super) sequence: i64,
    pub(super) place: i64,
    pub(super) ordering_key: Option<&'static str>,
    pub(super) topic: &'static str,
    pub(super) registration: Option<Uuid>,
    stored_at: i64,
    /// The part that is emptied as a whole.
    part: u64,
}

impl Event {
    fn mark(&self) -> Mark {
        Mark {
            id: Uuid::from_u128(self.id as u128),
            stored_at: Some(self.stored_at),
        }
    }

    fn cursor(&self) -> Cursor {
        Cursor::new(self.position, Some(self.mark()))
    }
}

/// A feed.
#[derive(Debug, Clone)]
pub(super) struct Feed {
    pub(super) registration: Option<Uuid>,
    /// The last emptied event.
    base: Cursor,
    /// All events that there ever were, also those that were emptied.
    pub(super) log: Vec<Event>,
}

/// The parts of all feeds: those from the first one to the open one have events.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct FeedParts {
    first: u64,
    open: u64,
}

impl Tables {
    /// The events of a feed that are not emptied.
    fn kept<'t>(&self, feed: &'t Feed) -> impl DoubleEndedIterator<Item = &'t Event> {
        let first = self.parts.first;
        feed.log.iter().filter(move |event| event.part >= first)
    }

    /// The last event of a feed.
    fn feed_end(&self, feed: &Feed) -> Cursor {
        let last = self.kept(feed).next_back().map(Event::cursor);
        match self.broken {
            Some(Broken::ReusesEmptiedPositions) => last.unwrap_or(Cursor::START),
            _ => last.unwrap_or(feed.base),
        }
    }

    /// A transaction registers a feed, or gives it to another tenant. Its row says which registration it belongs to.
    pub(super) fn register_feed(&mut self, name: &'static str, registration: Option<Uuid>) {
        let end = self.feeds.get(name).map(|feed| self.feed_end(feed));
        let feed = self.feeds.entry(name).or_insert_with(|| Feed {
            registration,
            base: Cursor::START,
            log: Vec::new(),
        });
        feed.registration = registration;
        feed.base = end.unwrap_or(feed.base);
    }

    /// Whether a message of this registration may be stored in the feed.
    pub(super) fn takes(&self, feed: &str, registration: Option<Uuid>) -> bool {
        let is_any = self.broken == Some(Broken::StoresForAnyRegistration);
        let row = self.feeds.get(feed);
        row.is_some_and(|row| is_any || row.registration == registration)
    }

    /// The positions that the next events of the feeds follow, as an open transaction sees them.
    pub(super) fn feed_ends(&self) -> Vec<(&'static str, i64)> {
        let ends = self.feeds.iter();
        ends.map(|(name, feed)| (*name, self.feed_end(feed).position()))
            .collect()
    }

    /// Gives the events of a settle their positions.
    pub(super) fn number_events(&mut self, changes: &mut Changes) {
        let by_place = |(feed, event): &(&'static str, Event)| (*feed, event.place, event.sequence);
        changes.events.sort_by_key(by_place);
        let mut ends = match changes.ends.is_empty() {
            true => self.feed_ends(),
            false => std::mem::take(&mut changes.ends),
        };
        for (feed, event) in &mut changes.events {
            let Some((_, last)) = ends.iter_mut().find(|(name, _)| name == feed) else {
                continue;
            };
            if self.broken == Some(Broken::NumbersWithoutLock) {
                let counter = self.counters.entry(*feed).or_default();
                *counter += 1;
                *last = *counter;
            } else {
                *last += 1;
            }
            (event.position, event.part) = (*last, self.parts.open);
        }
    }

    pub(super) fn add_events(&mut self, events: &[(&'static str, Event)]) {
        for (feed, event) in events {
            if let Some(feed) = self.feeds.get_mut(feed) {
                feed.log.push(event.clone());
                feed.log.sort_by_key(|event| event.position);
            }
        }
    }

    /// Empties the oldest part, or all but the open one, and opens the next. A transaction that holds a feed prevents it.
    pub(super) fn empty_events(&mut self, all: bool) {
        if !self.held_feeds.is_empty() {
            return;
        }
        let FeedParts { first, open } = self.parts;
        if first < open {
            let next = if all { open } else { first + 1 };
            for feed in self.feeds.values_mut() {
                let emptied = feed.log.iter().filter(|event| event.part < next);
                if let Some(last) = emptied.map(Event::cursor).next_back()
                    && last.position() > feed.base.position()
                {
                    feed.base = last;
                }
            }
            self.parts.first = next;
        }
        let mut events = self.feeds.values().flat_map(|feed| &feed.log);
        if events.any(|event| event.part == open) {
            self.parts.open += 1;
        }
    }

    /// An event for a settled message.
    pub(super) fn event(
        &self,
        row: &super::tables::Row,
        registration: Option<Uuid>,
        stored_at: i64,
    ) -> Event {
        Event {
            position: 0,
            id: row.id,
            sequence: row.sequence,
            place: row.place(),
            ordering_key: row.ordering_key,
            topic: row.topic,
            registration,
            stored_at,
            part: self.parts.open,
        }
    }
}

/// A consumer of a feed.
#[derive(Debug, Clone)]
pub(super) struct Reader {
    feed: &'static str,
    /// The longest pause between two pages, in milliseconds.
    pause: u64,
    /// The registration whose token it has.
    registration: Option<Uuid>,
    after: After,
    /// The events that it has read since its beginning.
    seen: Vec<(i64, Uuid)>,
    /// How often the database had been set back at its last page.
    set_back: u32,
}

impl Reader {
    /// Readers of these feeds: fast and slow ones.
    pub(super) fn of(feeds: &[&'static str]) -> Vec<Self> {
        let reader = |feed, pause| Self {
            feed,
            pause,
            registration: None,
            after: After::Begin,
            seen: Vec::new(),
            set_back: 0,
        };
        let of_feed = |feed: &&'static str| [reader(feed, 40), reader(feed, 3000)];
        feeds.iter().flat_map(of_feed).collect()
    }

    fn begin_again(&mut self) {
        self.after = After::Begin;
        self.seen.clear();
    }
}

/// A connection of a reader.
struct Connection<'w> {
    stage: &'w Stage<'w>,
    server: u64,
    after: After,
}

impl Connection<'_> {
    fn ask<T>(&self, ask: impl FnOnce(&Tables) -> T) -> QueryResult<T> {
        let stage = self.stage;
        let may_be_slow = !stage.history.is_calm() && !stage.is_calm_now();
        let longest = match may_be_slow && stage.rng(|rng| rng.u8(..8) == 0) {
            true => LONGEST_STEP,
            false => STEP,
        };
        stage.pass_by(stage.dice(0, longest));
        match stage.is_server(Some(self.server)) {
            true => Ok(ask(&stage.tables.borrow())),
            false => Err(Error::BrokenTransactionManager),
        }
    }
}

impl PageSource for &Connection<'_> {
    fn feed(&mut self, name: &str) -> QueryResult<Option<FeedRow>> {
        self.ask(|tables| {
            let feed = tables.feeds.get(name)?;
            let living = tables.registered.get(name)?;
            let is_there = feed.registration == Some(living.id);
            is_there.then(|| FeedRow {
                name: name.to_owned(),
                registration: feed.registration,
                tenant_id: None,
                base: feed.base,
            })
        })
    }

    fn events(&mut self, row: &FeedRow, from: i64, most: i64) -> QueryResult<Vec<FeedEvent>> {
        self.ask(|tables| {
            let feed = tables.feeds.get(row.name.as_str());
            let is_any = tables.broken == Some(Broken::ReadsForAnyRegistration);
            let feed = feed.filter(|feed| is_any || feed.registration == row.registration);
            let events = feed.into_iter().flat_map(|feed| tables.kept(feed));
            let behind = events.filter(|event| event.position >= from);
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            let asked = match (tables.broken, self.after) {
                (Some(Broken::ComparesPositionsOnly), After::Cursor(at)) => Some(at),
                _ => None,
            };
            let mark = |event: &Event| {
                let asked = asked.filter(|at| at.position() == event.position);
                let mark = asked.and_then(|at| at.event());
                mark.unwrap_or_else(|| event.mark())
            };
            let event = |event: &Event| FeedEvent {
                position: event.position,
                message_id: mark(event).id,
                stored_at: mark(event).stored_at.unwrap_or_default(),
                sequence: event.sequence,
                topic: event.topic.to_owned(),
                payload: None,
                headers: None,
                ordering_key: event.ordering_key.map(str::to_owned),
                tenant_id: event.registration,
                created_at: UNIX_EPOCH,
                occurred_at: None,
            };
            behind.take(most).map(event).collect()
        })
    }

    fn last(&mut self, row: &FeedRow) -> QueryResult<Cursor> {
        self.ask(|tables| {
            let feed = tables.feeds.get(row.name.as_str());
            let feed = feed.filter(|feed| feed.registration == row.registration);
            let base = match tables.broken {
                Some(Broken::ReadsFormerBase) => None,
                _ => feed.map(|feed| feed.base),
            };
            let base = base.unwrap_or(row.base);
            let last = feed.and_then(|feed| tables.kept(feed).next_back());
            let last = last.filter(|event| event.position > base.position());
            last.map_or(base, Event::cursor)
        })
    }

    fn before(&mut self, row: &FeedRow, _: std::time::SystemTime) -> QueryResult<Cursor> {
        Ok(row.base)
    }
}

impl<'w> Stage<'w> {
    /// The feeds that a settle names.
    pub(super) fn feeds_of(&self, settle: &Settle<'_>) -> Vec<&'static str> {
        let each = settle.group.iter().flat_map(Settlement::each);
        let named = each.filter_map(|one| delivered(one, settle.bulkheads));
        let named: BTreeSet<_> = named.map(|one| one.destination).collect();
        let feeds = self.history.feeds.iter().copied();
        feeds.filter(|feed| named.contains(*feed)).collect()
    }

    /// A reader reads a page. Returns how long it pauses.
    pub(super) fn read(&'w self, number: usize) -> Duration {
        let mut reader = self.readers.borrow()[number].clone();
        if let Some(server) = self.reached() {
            let connection = Connection {
                stage: self,
                server,
                after: reader.after,
            };
            // Without an answer, it asks again.
            let _ = self.read_page(&connection, &mut reader);
        }
        let pause = self.dice(0, reader.pause);
        self.readers.borrow_mut()[number] = reader;
        pause
    }

    fn read_page(&self, mut connection: &Connection<'w>, reader: &mut Reader) -> QueryResult<()> {
        let Some(row) = connection.feed(reader.feed)? else {
            return Ok(());
        };
        // A token is removed with its registration.
        let living =
            connection.ask(|tables| tables.registered.get(reader.feed).map(|one| one.id))?;
        if living.is_none() || living != reader.registration {
            reader.registration = living;
            reader.begin_again();
            return Ok(());
        }
        let page = page::page(connection, &row, reader.after, PAGE);
        if !self.is_server(Some(connection.server)) {
            return Ok(());
        }
        let set_back = self.set_back.get();
        let was_set_back = std::mem::replace(&mut reader.set_back, set_back) != set_back;
        match page {
            Ok(Ok(page)) => {
                self.check_page(reader, &page.events);
                reader.after = After::Cursor(page.next);
            }
            Ok(Err(why)) => {
                self.tell(|| format!("a reader of {} is told: {why:?}", reader.feed));
                let tables = self.tables.borrow();
                let base = tables
                    .feeds
                    .get(reader.feed)
                    .map(|feed| feed.base.position());
                let is_emptied =
                    matches!(reader.after, After::Cursor(at) if Some(at.position()) < base);
                let is_so = match why {
                    Discontinued::Expired { .. } => is_emptied,
                    Discontinued::Changed { .. } => was_set_back,
                };
                if !is_so {
                    self.fall(Promise::Cursor, || {
                        format!(
                            "a reader of {} at {:?} is told: {why:?}",
                            reader.feed, reader.after
                        )
                    });
                }
                reader.begin_again();
            }
            Err(error) => self.fall(Promise::Gap, || {
                format!(
                    "a page of {} behind {:?}: {error}",
                    reader.feed, reader.after
                )
            }),
        }
        Ok(())
    }

    /// Checks that a reader has each event once, and none that another registration had.
    fn check_page(&self, reader: &mut Reader, events: &[FeedEvent]) {
        let name = reader.feed;
        if !events.is_empty() {
            self.tell(|| {
                let at = |event: &FeedEvent| (event.position, event.sequence);
                let events: Vec<_> = events.iter().map(at).collect();
                format!("a reader of {name} reads {events:?}")
            });
        }
        let of_other = events
            .iter()
            .find(|one| one.tenant_id != reader.registration);
        if let Some(event) = of_other {
            self.fall(Promise::Address, || {
                format!(
                    "a reader of {name} of {:?} reads {event:?}",
                    reader.registration
                )
            });
        }
        let read = events.iter().map(|one| (one.position, one.message_id));
        reader.seen.extend(read);
        self.check_seen(reader);
    }

    /// Checks that what a reader has read is what the feed has, without a gap and in this order.
    fn check_seen(&self, reader: &Reader) {
        let tables = self.tables.borrow();
        let Some((first, _)) = reader.seen.first() else {
            return;
        };
        let log = tables.feeds.get(reader.feed).map(|feed| &feed.log[..]);
        let log = log.unwrap_or_default();
        let log = &log[log.partition_point(|event| event.position < *first)..];
        let mut both = reader.seen.iter().zip(log);
        let differs = both.find(|((position, id), event)| {
            event.position != *position || event.id as u128 != id.as_u128()
        });
        if differs.is_some() || log.len() < reader.seen.len() {
            self.fall(Promise::Gap, || {
                format!(
                    "a reader of {} has read {} events from {first} on, and the feed has {}: {differs:?}",
                    reader.feed,
                    reader.seen.len(),
                    log.len()
                )
            });
        }
    }

    /// Checks that the events of a settle are in the order of their keys.
    pub(super) fn check_events(&self, changes: &Changes) {
        for (number, (feed, event)) in changes.events.iter().enumerate() {
            let mut before = changes.events[..number].iter();
            let is_behind = |other: &&(&str, Event)| {
                let (its, other) = other;
                its == feed
                    && event.ordering_key.is_some()
                    && other.ordering_key == event.ordering_key
                    && (other.place > event.place) != (other.position > event.position)
            };
            if let Some(other) = before.find(is_behind) {
                self.fall(Promise::Order, || {
                    format!("{event:?} is stored behind {other:?}")
                });
            }
            self.tell(|| format!("stored in {feed}: {event:?}"));
            let mut messages = self.messages.borrow_mut();
            let count = messages[event.id].well.entry((*feed).to_owned());
            *count.or_default() += 1;
        }
    }

    /// Checks that each message that was recorded as delivered to a feed is one event of it, and that readers get it.
    pub(super) fn check_feeds(&'w self) {
        let readers = self.readers.borrow().len();
        for number in 0..readers {
            for _ in 0..LAST_PAGES {
                if self.fall.borrow().is_some() || self.has_all(number) {
                    break;
                }
                self.read(number);
            }
            if !self.has_all(number) {
                self.fall(Promise::Lost, || {
                    format!(
                        "a reader never gets all: {:?}",
                        self.readers.borrow()[number]
                    )
                });
            }
        }
        let tables = self.tables.borrow();
        for (name, feed) in &tables.feeds {
            let entries = tables.ledger.iter();
            let entries = entries.filter(|one| one.is_delivered && one.to == *name);
            let mut settled: Vec<i64> = entries.map(|one| one.row.sequence).collect();
            let mut stored: Vec<i64> = feed.log.iter().map(|one| one.sequence).collect();
            settled.sort_unstable();
            stored.sort_unstable();
            if settled != stored {
                self.fall(Promise::Doubled, || {
                    format!(
                        "{name} has the events of {stored:?}, but {settled:?} were delivered to it"
                    )
                });
            }
        }
    }

    /// Whether a reader has the last event of its feed.
    fn has_all(&self, number: usize) -> bool {
        let (readers, tables) = (self.readers.borrow(), self.tables.borrow());
        let reader = &readers[number];
        let Some(feed) = tables.feeds.get(reader.feed) else {
            return true;
        };
        let living = tables.registered.get(reader.feed).map(|one| one.id);
        // Nobody has a token of a feed that was removed.
        living.is_none()
            || (living == reader.registration
                && reader.after == After::Cursor(tables.feed_end(feed)))
    }
}

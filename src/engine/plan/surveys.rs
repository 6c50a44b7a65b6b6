//! Surveys: the periodic query for streams, expired leases and pauses, and for whether this relay is active.

use std::time::{Duration, Instant};

use super::lanes::SeenStreams;
use super::pace::{Last, Pace};
use crate::engine::claim::sql::claim::Stream;
use crate::engine::claim::sql::glance::Marks;
use crate::engine::claim::sql::streams::FoundStream;
use crate::engine::send::sql::pause::Paused;
use crate::sql::brief::Tried;

/// A query for streams that takes longer than this reads dead index entries.
const SLOW: Duration = Duration::from_millis(50);
/// The pace of slow queries for all streams: they add only the news that a stream has become empty.
const FOR_ALL: Pace = Pace::new(Duration::ZERO, 100);
/// The pace of slow queries for all but the known streams.
const BESIDE_KNOWN: Pace = Pace::of_search(Duration::ZERO);

/// The longest interval between surveys. The interval is otherwise the poll interval, but at least
/// [`SHORTEST_INTERVAL`].
pub(super) const INTERVAL: Duration = Duration::from_secs(1);
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);
/// Surveys take at most a fourth of the time if every statement is slow, and those because of news at most this part.
const REST: u32 = 3;
pub(super) const REST_AFTER_NEWS: u32 = 10;

/// News since the last survey: there may be new messages. If a survey was made a moment ago, the known lanes are asked
/// first, so that under load surveys do not delay claims.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum SurveyNews {
    #[default]
    None,
    Heard,
    /// The known lanes are asked again. The next survey finds the messages of other streams.
    Looked,
}

/// When surveys are made.
#[derive(Debug, Default)]
pub(super) struct Surveys {
    /// The queries for streams.
    pub(super) looks: Looks,
    /// When the last survey was made; `None`: a survey is due.
    made: Option<Instant>,
    /// The time until the next survey: without news, and with news.
    interval: Duration,
    news_interval: Duration,
    news: SurveyNews,
    /// When a survey must read the members, which the last survey has left out.
    pub(super) rows_owed: Option<Instant>,
    /// The server that answered the last survey.
    pub(super) server: Option<i64>,
}

impl Surveys {
    /// A survey is due now.
    pub(super) fn want(&mut self) {
        self.made = None;
    }

    /// There may be new messages.
    pub(super) fn hear(&mut self) {
        self.news = SurveyNews::Heard;
    }

    /// `is_asked`: a caller asks whether nothing is left.
    pub(super) fn is_due(&self, now: Instant, is_asked: bool) -> bool {
        let interval = match self.news {
            SurveyNews::None => self.interval,
            _ if is_asked => Duration::ZERO,
            _ => self.news_interval,
        };
        let is_time = |at: Instant| now.saturating_duration_since(at) >= interval;
        self.made.is_none_or(is_time) || self.rows_owed.is_some_and(|at| now >= at)
    }

    /// Whether the known lanes must be asked again, because of news.
    pub(super) fn take_news(&mut self) -> bool {
        let is_new = self.news == SurveyNews::Heard;
        if is_new {
            self.news = SurveyNews::Looked;
        }
        is_new
    }

    /// Whether there is something to find out before a wait.
    pub(super) fn is_wanted(&self) -> bool {
        self.made.is_none() || self.news == SurveyNews::Heard
    }

    /// When the survey is made that news, members or a query that was left out have made due.
    pub(super) fn owed_at(&self) -> Option<Instant> {
        let news = self.made.filter(|_| self.news != SurveyNews::None);
        let news = news.map(|at| at + self.news_interval);
        let owed = self.rows_owed.into_iter().chain(self.looks.owed_at());
        owed.chain(news).min()
    }

    /// A survey is made. Returns whether it was wanted, apart from the time.
    pub(super) fn end(&mut self, began: Instant, now: Instant, poll_interval: Duration) -> bool {
        let was_wanted = self.made.is_none() || self.news != SurveyNews::None;
        self.made = Some(now);
        self.news = SurveyNews::None;
        let took = now.saturating_duration_since(began);
        let poll = poll_interval.clamp(SHORTEST_INTERVAL, INTERVAL);
        self.interval = poll.max(REST * took).min(INTERVAL);
        self.news_interval = (REST_AFTER_NEWS * took).min(self.interval);
        was_wanted
    }
}

/// A survey to make.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Survey {
    pub(crate) streams: Streams,
    /// The look that the survey begins.
    pub(super) look: SurveyLook,
}

/// Which streams a survey queries.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Streams {
    All,
    /// All but these streams.
    Beside(Vec<Stream>),
    /// Only the streams of messages after this sequence: a query for the others would take too long.
    Behind(i64),
}

/// The result of a survey.
#[derive(Debug)]
pub(crate) struct Surveyed {
    /// `None`: the query for streams took too long.
    pub(crate) streams: Option<Vec<FoundStream>>,
    /// How long the query for streams took.
    pub(crate) took: Duration,
    /// Leases that expire soon, unless their relays reconnect.
    pub(crate) shortened: Vec<i64>,
    /// Expired leases.
    pub(crate) ended: Vec<i64>,
    /// Whether this relay is active; otherwise it stands by.
    pub(crate) is_active: bool,
    /// The database's time, in microseconds.
    pub(crate) time: i64,
    /// A number that identifies the server.
    pub(crate) server: i64,
    /// The table of pauses.
    pub(crate) paused: Tried<Vec<Paused>>,
    /// The marks of members, if they were asked for and could be read in a moment, and how long that
    /// took.
    pub(crate) marks: Option<(Marks, Duration)>,
}

/// A pass over all lanes, which may take several claims.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SurveyLook {
    /// The last question asked before the survey.
    pub(super) question: u64,
    pub(super) began: Instant,
    pub(super) nothing_in_flight: bool,
    pub(super) found_nothing: bool,
}

impl SurveyLook {
    /// A look that begins now.
    pub(super) fn new(now: Instant, question: u64, nothing_in_flight: bool) -> Self {
        Self {
            question,
            began: now,
            nothing_in_flight,
            found_nothing: true,
        }
    }
}

/// How long the last queries for streams took.
#[derive(Debug, Default)]
pub(super) struct Looks {
    for_all: Option<Last>,
    beside_known: Option<Last>,
    /// Whether the last query was left out.
    is_owed: bool,
}

impl Looks {
    /// Chooses the streams to query: normally all. If an old snapshot makes that slow, all but the known streams. If
    /// that is slow, too, mostly the streams of messages after `newest`; all but the known streams only now and then,
    /// or while a question is open.
    pub(super) fn next(
        &mut self,
        now: Instant,
        known: impl FnOnce() -> Vec<Stream>,
        is_asked: bool,
        newest: i64,
        moment: Duration,
    ) -> Streams {
        let is_slow = |last: &Last| last.took >= SLOW.min(moment);
        let is_due = |pace: Pace, last: Option<Last>| pace.is_due(now, last.filter(is_slow));
        let is_all = is_due(FOR_ALL, self.for_all);
        self.is_owed = !is_all && !is_asked && !is_due(BESIDE_KNOWN, self.beside_known);
        match (is_all, self.is_owed) {
            (true, _) => Streams::All,
            (false, true) => Streams::Behind(newest),
            (false, false) => Streams::Beside(known()),
        }
    }

    /// Learns the cost of a query. `found` is `None` if the query took too long.
    pub(super) fn learn(
        &mut self,
        now: Instant,
        looked: &Streams,
        found: Option<Vec<FoundStream>>,
        took: Duration,
    ) -> SeenStreams {
        let last = Last { ended: now, took };
        match looked {
            Streams::All => self.for_all = Some(last),
            Streams::Beside(_) => self.beside_known = Some(last),
            Streams::Behind(_) => {}
        }
        let is_slow = took >= SLOW || found.is_none() || matches!(looked, Streams::Behind(_));
        SeenStreams {
            is_all: *looked == Streams::All && found.is_some(),
            slow: is_slow.then_some(took),
            found: found.unwrap_or_default(),
        }
    }

    /// When the query that was left out may be made: messages announced meanwhile may be in an unknown stream.
    pub(super) fn owed_at(&self) -> Option<Instant> {
        let last = self.beside_known.filter(|_| self.is_owed)?;
        Some(BESIDE_KNOWN.next(last))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R9: messages announced meanwhile may be in an unknown stream, and they are not announced again.
    #[test]
    fn a_look_that_was_left_out_is_owed_until_it_may_be_made() {
        let (now, moment) = (Instant::now(), Duration::from_millis(250));
        let mut looks = Looks::default();
        let next =
            |looks: &mut Looks, now, is_asked| looks.next(now, Vec::new, is_asked, 7, moment);
        assert_eq!(next(&mut looks, now, false), Streams::All);
        let slow = Duration::from_millis(200);
        looks.learn(now, &Streams::All, Some(Vec::new()), slow);
        let beside = next(&mut looks, now, false);
        assert_eq!(beside, Streams::Beside(Vec::new()));
        assert_eq!(looks.owed_at(), None, "the query is made");
        looks.learn(now, &beside, Some(Vec::new()), slow);
        assert_eq!(next(&mut looks, now, true), beside, "a question is open");
        assert_eq!(next(&mut looks, now, false), Streams::Behind(7));
        assert_eq!(looks.owed_at(), Some(now + BESIDE_KNOWN.rest * slow));
        let later = now + BESIDE_KNOWN.rest * slow;
        assert_eq!(next(&mut looks, later, false), beside);
        let later = now + FOR_ALL.rest * slow;
        assert_eq!(next(&mut looks, later, false), Streams::All);
    }
}

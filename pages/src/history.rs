//! The state of the outbox a moment ago, and over the last hour.
//!
//! Queries cost the database time, so all pages share one recent result (a glance). A separate thread, the sampler,
//! queries every ten seconds for the curves.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use diesel::PgConnection;
use diesel_outbox::admin::{self, Depths, Pausable, Pause};
use diesel_outbox::program::{self, Activity, BlockedKey, LeaseRow, Rates};
use diesel_outbox::{DatabaseError, OutboxName};

use crate::PagesError;
use crate::database::{Connection, Connections};
use crate::labels::Labels;

/// The shortest time between two samples.
const PERIOD: Duration = Duration::from_secs(10);
/// The sampler rests this many times the duration of its last query.
const RESTS: u32 = 100;
const HOUR: Duration = Duration::from_secs(3600);
/// The shortest span of a curve, used right after a start.
const SHORTEST: Duration = Duration::from_secs(300);
/// Points in a curve.
const POINTS: usize = 120;
/// Samples further apart leave a gap in the curves.
const LONGEST_GAP: Duration = Duration::from_secs(120);
/// A page shows a glance at most this old, or this many times the duration of the query, but at most `OLDEST`.
const YOUNG: Duration = Duration::from_secs(2);
const YOUNG_TIMES: u32 = 50;
const OLDEST: Duration = Duration::from_secs(60);
/// Rates are measured over the last minute.
const MINUTE: Duration = Duration::from_secs(60);
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);
/// Blocked keys that the overview names.
const MOST_KEYS: i64 = 3;
/// How long a shutdown waits for the sampler, which may hang in the database.
const END_PATIENCE: Duration = Duration::from_millis(500);

/// The state of the outbox that an operator wants to know first.
pub(crate) struct Glance {
    pub(crate) depths: Depths,
    pub(crate) leases: Vec<LeaseRow>,
    pub(crate) pauses: Vec<Pause>,
    /// Those of the endpoints that messages name or that are paused.
    pub(crate) labels: Labels,
    /// The first `MOST_KEYS` of them.
    pub(crate) blocked_keys: Vec<BlockedKey>,
    activity: Activity,
    pub(crate) at: SystemTime,
}

impl Glance {
    pub(crate) fn look(
        conn: &mut PgConnection,
        outbox: &OutboxName,
    ) -> Result<Self, DatabaseError> {
        Self::read(conn, outbox).map_err(|error| match admin::check_schema(conn, outbox) {
            // The schema error says what is missing and what to do.
            Err(missing @ DatabaseError::Schema(_)) => missing,
            _ => error,
        })
    }

    fn read(conn: &mut PgConnection, outbox: &OutboxName) -> Result<Self, DatabaseError> {
        let depths = admin::depths(conn, outbox)?;
        let pauses = admin::pauses(conn, outbox)?;
        let is_of_destination = |pause: &&Pause| pause.kind == Pausable::Destination;
        let paused = pauses.iter().filter(is_of_destination);
        let paused = paused.map(|pause| pause.name.as_str());
        let lanes = depths.lanes.iter().map(|lane| lane.destination.as_str());
        let dead = depths.dead.iter().map(|dead| dead.destination.as_str());
        Ok(Self {
            labels: Labels::read(conn, outbox, paused.chain(lanes).chain(dead))?,
            depths,
            leases: program::leases(conn, outbox)?,
            pauses,
            blocked_keys: program::blocked_keys(conn, outbox, MOST_KEYS)?,
            activity: program::activity(conn, outbox)?,
            at: SystemTime::now(),
        })
    }

    /// Age of the oldest due message of all lanes, in seconds; `None`: no message is due.
    pub(crate) fn oldest_due_seconds(&self) -> Option<f64> {
        let ages = self.depths.lanes.iter();
        ages.filter_map(|lane| lane.oldest_due_seconds)
            .reduce(f64::max)
    }

    fn waiting(&self) -> i64 {
        self.depths.pending() + self.depths.retrying()
    }

    /// The relays that are alive.
    fn relays(&self) -> impl Iterator<Item = &LeaseRow> {
        self.leases.iter().filter(|lease| lease.is_alive())
    }

    /// Whether a relay that is not switched off is alive.
    pub(crate) fn has_relay(&self) -> bool {
        self.relays().any(|lease| lease.enabled)
    }

    /// A relay that runs with `OUTBOX_ENABLED=false`.
    pub(crate) fn switched_off(&self) -> Option<&str> {
        let mut relays = self.relays().filter(|lease| !lease.enabled);
        relays.next().map(|lease| lease.relay.as_str())
    }
}

/// One result of the sampler.
struct Sample {
    at: Instant,
    activity: Activity,
    waiting: i64,
    oldest_due_seconds: f64,
}

/// Curves over the last hour, or since this process started sampling. Oldest point first; `None` is a gap without
/// data.
#[derive(Debug, PartialEq)]
pub(crate) struct Curves {
    pub(crate) span: Duration,
    /// Per second, like all rates here.
    pub(crate) enqueued: Vec<Option<f64>>,
    pub(crate) settled: Vec<Option<f64>>,
    pub(crate) dead_lettered: Vec<Option<f64>>,
    pub(crate) waiting: Vec<Option<f64>>,
    pub(crate) oldest_due_seconds: Vec<Option<f64>>,
}

/// The latest glance of any page or the sampler, and the samples of the last hour.
#[derive(Default)]
pub(crate) struct History(Mutex<Looks>);

#[derive(Default)]
struct Looks {
    latest: Option<Latest>,
    /// When a page last changed the outbox.
    changed: Option<Instant>,
    samples: VecDeque<Sample>,
}

struct Latest {
    glance: Arc<Glance>,
    began: Instant,
    took: Duration,
}

impl History {
    fn lock(&self) -> MutexGuard<'_, Looks> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The latest glance, regardless of age.
    pub(crate) fn latest(&self) -> Option<Arc<Glance>> {
        self.lock()
            .latest
            .as_ref()
            .map(|latest| Arc::clone(&latest.glance))
    }

    /// The latest glance, if it is recent enough to be shown without another query.
    pub(crate) fn young(&self) -> Option<Arc<Glance>> {
        let looks = self.lock();
        let latest = looks.latest.as_ref()?;
        let is_young = latest.began.elapsed() <= may_be_old(latest.took)
            && looks.changed.is_none_or(|changed| latest.began > changed);
        is_young.then(|| Arc::clone(&latest.glance))
    }

    /// After a change, earlier glances no longer count as recent.
    pub(crate) fn forget(&self) {
        self.lock().changed = Some(Instant::now());
    }

    /// Keeps a glance whose query started at `began`.
    pub(crate) fn keep(&self, glance: Glance, began: Instant) -> Arc<Glance> {
        let glance = Arc::new(glance);
        self.lock().latest = Some(Latest {
            glance: Arc::clone(&glance),
            began,
            took: began.elapsed(),
        });
        glance
    }

    fn sample(&self, glance: &Glance, at: Instant) {
        let mut looks = self.lock();
        looks.samples.push_back(Sample {
            at,
            activity: glance.activity,
            waiting: glance.waiting(),
            oldest_due_seconds: glance.oldest_due_seconds().unwrap_or(0.0),
        });
        while looks
            .samples
            .front()
            .is_some_and(|first| at.duration_since(first.at) > HOUR + PERIOD)
        {
            looks.samples.pop_front();
        }
    }

    /// Rates per second over the last minute. `None`: no data yet.
    pub(crate) fn rates(&self, glance: &Glance) -> Option<Rates> {
        let looks = self.lock();
        let now = Instant::now();
        let is_long_ago = |sample: &&Sample| now.duration_since(sample.at) >= MINUTE;
        let base = looks
            .samples
            .iter()
            .rev()
            .find(is_long_ago)
            .or(looks.samples.front())?;
        if now.duration_since(base.at) > LONGEST_GAP + MINUTE {
            return None;
        }
        glance.activity.since(&base.activity)
    }

    pub(crate) fn curves(&self) -> Curves {
        curves(&self.lock().samples, Instant::now())
    }
}

/// How old a glance may be, given the duration of its query.
fn may_be_old(took: Duration) -> Duration {
    (took * YOUNG_TIMES).clamp(YOUNG, OLDEST)
}

/// The time between the start of a query of this duration and the start of the next. It stays short enough to leave
/// no gap in the curves.
fn rest(took: Duration) -> Duration {
    (took * RESTS).clamp(PERIOD, LONGEST_GAP / 2)
}

fn curves(samples: &VecDeque<Sample>, now: Instant) -> Curves {
    let first = samples.front().map(|first| now.duration_since(first.at));
    let span = first.unwrap_or_default().clamp(SHORTEST, HOUR);
    let mut curves = Curves {
        span,
        enqueued: vec![None; POINTS],
        settled: vec![None; POINTS],
        dead_lettered: vec![None; POINTS],
        waiting: vec![None; POINTS],
        oldest_due_seconds: vec![None; POINTS],
    };
    for (earlier, later) in samples.iter().zip(samples.iter().skip(1)) {
        if later.at.duration_since(earlier.at) > LONGEST_GAP {
            continue;
        }
        for point in points(now, span, earlier.at, later.at) {
            // Keep the peak of each point: an operator looks for peaks.
            let raise = |curve: &mut Vec<Option<f64>>, value: f64| {
                if let Some(place) = curve.get_mut(point) {
                    *place = Some(place.map_or(value, |before| before.max(value)));
                }
            };
            if let Some(rates) = later.activity.since(&earlier.activity) {
                raise(&mut curves.enqueued, rates.enqueued);
                raise(&mut curves.settled, rates.settled);
                raise(&mut curves.dead_lettered, rates.dead_lettered);
            }
            #[allow(clippy::cast_precision_loss, reason = "only drawn")]
            raise(&mut curves.waiting, later.waiting as f64);
            raise(&mut curves.oldest_due_seconds, later.oldest_due_seconds);
        }
    }
    curves
}

/// The points of a curve of this span that cover the time between `from` and `to`.
fn points(now: Instant, span: Duration, from: Instant, to: Instant) -> Range<usize> {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "`as` saturates"
    )]
    let end = |at: Instant| {
        let ago = now.duration_since(at).as_secs_f64() / span.as_secs_f64();
        ((1.0 - ago) * POINTS as f64).round() as usize
    };
    let (from, to) = (end(from), end(to));
    // An interval shorter than one point still covers a point.
    from.min(to.saturating_sub(1))..to
}

/// The sampler thread. Dropping this ends it.
pub(crate) struct Sampler {
    stop: Option<Sender<()>>,
    ended: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    pub(crate) fn start(
        source: &Connections,
        outbox: &OutboxName,
        history: &Arc<History>,
    ) -> Result<Self, PagesError> {
        let (stop, stopped) = bounded(0);
        let (end, ended) = bounded(0);
        let mut look = Look {
            connection: Connection::new(source, "admin sampler", STATEMENT_TIMEOUT),
            outbox: outbox.clone(),
            history: Arc::clone(history),
            is_away: false,
        };
        let thread = std::thread::Builder::new()
            .name("admin-sampler".to_owned())
            .spawn(move || {
                let _end: Sender<()> = end;
                look.run(&stopped);
            })
            .map_err(PagesError::Thread)?;
        Ok(Self {
            stop: Some(stop),
            ended,
            thread: Some(thread),
        })
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        drop(self.stop.take());
        // A thread that hangs in the database is left to end with the process.
        let has_ended =
            self.ended.recv_timeout(END_PATIENCE) == Err(RecvTimeoutError::Disconnected);
        if let Some(thread) = self.thread.take()
            && has_ended
            && thread.join().is_err()
        {
            log::error!(event = "admin_panic"; "admin page: the thread that samples the outbox panicked");
        }
    }
}

/// The work of the sampler, with a connection of its own.
struct Look {
    connection: Connection,
    outbox: OutboxName,
    history: Arc<History>,
    is_away: bool,
}

impl Look {
    fn run(&mut self, stopped: &Receiver<()>) {
        let mut next = Instant::now();
        loop {
            let began = Instant::now();
            if began >= next {
                self.look();
                next = began + rest(began.elapsed());
            }
            let rest = next.saturating_duration_since(Instant::now());
            if stopped.recv_timeout(rest) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    fn look(&mut self) {
        let seen = self.connection.run(|conn| {
            let began = Instant::now();
            Ok((Glance::look(conn, &self.outbox)?, began))
        });
        match seen {
            Ok((glance, began)) => {
                self.is_away = false;
                let glance = self.history.keep(glance, began);
                self.history.sample(&glance, Instant::now());
            }
            // Logged once per outage.
            Err(error) if !self.is_away => {
                self.is_away = true;
                log::warn!(event = "admin_look_failed", error:% = format!("{error:#}"); "admin page: cannot read the outbox: {error:#}");
            }
            Err(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_counted_back_from_now() {
        let now = Instant::now() + HOUR + HOUR;
        let ago = |seconds| now - Duration::from_secs(seconds);
        let within = |from, to| points(now, HOUR, ago(from), ago(to));
        assert_eq!(within(30, 0), 119..120);
        assert_eq!(within(10, 0), 119..120);
        assert_eq!(within(90, 30), 117..119);
        assert_eq!(within(3600, 3570), 0..1);
        assert_eq!(within(4000, 3540), 0..2);
        assert_eq!(within(5000, 4000), 0..0);
        assert_eq!(points(now, SHORTEST, ago(10), ago(0)), 116..120);
    }

    #[test]
    fn however_long_a_look_has_taken_another_follows_before_it_is_old() {
        let seconds = Duration::from_secs;
        let looks = [Duration::ZERO, seconds(1), seconds(20)];
        assert_eq!(looks.map(may_be_old), [YOUNG, seconds(50), OLDEST]);
        assert_eq!(looks.map(rest), [PERIOD, seconds(60), seconds(60)]);
    }

    #[test]
    fn without_looks_nothing_is_known() {
        let curves = curves(&VecDeque::new(), Instant::now());
        assert_eq!(curves.waiting.len(), POINTS);
        assert!(curves.waiting.iter().all(Option::is_none));
        assert!(History::default().young().is_none());
    }
}

//! The consumer's side of a feed: pages over blocking HTTP.

use std::time::{Duration, Instant};

use secrecy::SecretString;
use serde::Deserialize;
use url::Url;

use super::cursor::{Cursor, Mark};
use super::page::After;
use crate::backoff::Backoff;
use crate::config::{ConfigError, Roots};
use crate::http::{PageAnswer, PageClient, PageLost};
use crate::log;
use crate::receive::{CloudEvent, Headers, events};
use crate::schema::values::{as_micros, from_micros};

/// The cursor of the next request.
const NEXT: &str = "outbox-feed-next";
/// The limits of the server.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
const MOST_EVENTS: u32 = 1_000;
/// How often a wait asks whether to keep going.
const GLANCE: Duration = Duration::from_millis(200);
/// The most characters of a server's explanation.
const LONGEST_DETAIL: usize = 300;

/// Reads a feed over blocking HTTP, page by page.
///
/// A page is asked for with a long poll: the server answers with the next event, or with an empty page after
/// [`wait`](Self::wait). Every request ends in time. Requests that fail (no connection, no whole response, 408, 425, 429,
/// 5xx) are retried with backoff and jitter, and as late as `Retry-After` asks; all other statuses are errors at once.
/// Redirects are not followed, because the token is for this server only. A page that does not continue its cursor
/// without a hole is an error, never a silent jump.
///
/// [`consume`](super::consume) keeps the cursor in a database of the consumer. Without a database:
///
/// ```no_run
/// use diesel_outbox::feed::{After, Reader};
///
/// let url = "https://shop.example/api/v1/feeds/crm/events";
/// let reader = Reader::new(url, std::fs::read_to_string("token")?.trim().into())?;
/// let mut after = After::Begin;
/// loop {
///     let page = reader.page(after)?;
///     for event in &page.events {
///         println!("{:?} {} {:?}", event.position(), event.event_type, event.json());
///     }
///     after = After::Cursor(page.next);
/// }
/// # #[allow(unreachable_code)]
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// All options:
///
/// ```
/// use std::time::{Duration, SystemTime};
///
/// use diesel_outbox::Backoff;
/// use diesel_outbox::config::Roots;
/// use diesel_outbox::feed::{After, Reader};
///
/// let seconds = Duration::from_secs;
/// let url = "http://shop.internal:9090/api/v1/feeds/crm/events";
/// let reader = Reader::new(url, "feed_7s1tCYcvZ0".into())?
///     .roots(Roots::Bundled)?
///     .proxy("http://proxy.internal:3128".into())?
///     .name("crm of the shop")
///     .begin(After::Time(SystemTime::now() - seconds(3600)))
///     .wait(seconds(30))
///     .timeout(seconds(10))
///     .limit(1_000)
///     .retry_for(Duration::MAX)
///     .backoff(Backoff::exponential(seconds(1), seconds(60)));
/// # Ok::<(), diesel_outbox::ConfigError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Reader {
    client: PageClient,
    token: SecretString,
    url: Url,
    roots: Roots,
    proxy: Option<SecretString>,
    name: String,
    begin: After,
    wait: Duration,
    timeout: Duration,
    limit: u32,
    retry_for: Duration,
    backoff: Backoff,
}

/// Events that follow each other, and the cursor behind them.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Page {
    /// The events, in order. Each has a [`position`](CloudEvent::position), 1 more than the event before it. An event whose
    /// content was expunged has no data, and the extension `expunged`.
    pub events: Vec<CloudEvent<'static>>,
    /// The cursor of the last event here; without events, of the last one that there is.
    pub next: Cursor,
}

/// Why a page cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// 410: events that follow were removed, because they are older than the feed's retention. Find out what is
    /// missing in another way, then continue with [`After::Begin`].
    #[error(
        "events that follow were removed: the first one that is kept has the position {first_position}"
    )]
    Expired {
        /// The position of the first event that is kept.
        first_position: i64,
    },
    /// 409: the feed has another event at the cursor, or none: its database was restored. Continue with [`After::Time`],
    /// a time before the last event that you have, and skip ids that you know.
    #[error(
        "the feed has another event at the cursor, or none: its database was restored, and its last position is {last_position}"
    )]
    Changed {
        /// The position of the last event.
        last_position: i64,
    },
    /// The server refuses the request: the token (401, 403), the URL (404), or another reason. A retry would not help.
    #[error("the server returned {status}: {detail}")]
    Refused {
        /// The status of the response.
        status: u16,
        /// What the server says about it.
        detail: String,
    },
    /// The server has not answered for [`retry_for`](Reader::retry_for), or asks to come back later than that.
    #[error("the feed cannot be read: {reason}")]
    Unavailable {
        /// The last failure.
        reason: String,
    },
    /// The page does not continue its cursor: the server, or something before it, is at fault. Nothing of the page is
    /// used.
    #[error("the page has a hole: expected the position {expected}, found {found}")]
    Hole {
        /// The position that continues the cursor.
        expected: i64,
        /// The position that the page has there.
        found: i64,
    },
    /// The response is no page of a feed, or larger than 64 MiB. Nothing of it is used.
    #[error("the response is no page of a feed: {reason}")]
    NotAPage {
        /// What is wrong.
        reason: String,
    },
}

/// The outcome of a request that has no page.
enum NoPage {
    ForGood(ReadError),
    /// Again after this time, or later.
    ForNow {
        reason: String,
        after: Option<Duration>,
    },
}

impl From<ReadError> for NoPage {
    fn from(error: ReadError) -> Self {
        Self::ForGood(error)
    }
}

impl Reader {
    /// A reader of the events at `url` (`https://shop.example/api/v1/feeds/crm/events`), with a token of the feed
    /// (`diesel-outbox feed token crm`). It connects with the first page.
    ///
    /// # Errors
    /// A [`ConfigError`] if the URL is not one of `http` or `https` without user, query and fragment, if no header can
    /// hold the token, or if the build has no cryptography for `https`.
    pub fn new(url: &str, token: SecretString) -> Result<Self, ConfigError> {
        let bad = |reason: &str| Err(ConfigError::new("url", reason));
        let url: Url = match url.parse() {
            Ok(url) => url,
            Err(error) => return bad(&format!("is not a URL: {error}")),
        };
        if !["http", "https"].contains(&url.scheme()) {
            return bad("must be a URL of http or https");
        }
        if !url.username().is_empty() || url.password().is_some() {
            return bad("must have no user and password: the token says who reads");
        }
        if url.query().is_some() || url.fragment().is_some() {
            return bad("must have no query and no fragment");
        }
        Ok(Self {
            client: PageClient::new(&url, &token, Roots::default(), None)?,
            token,
            roots: Roots::default(),
            proxy: None,
            name: url.to_string(),
            url,
            begin: After::Begin,
            wait: Duration::from_secs(20),
            timeout: Duration::from_secs(30),
            limit: 500,
            retry_for: Duration::from_secs(60),
            backoff: Backoff::exponential(Duration::from_millis(500), Duration::from_secs(30)),
        })
    }

    /// What TLS trusts. Defaults to [`Roots::Bundled`], Mozilla's list.
    ///
    /// # Errors
    /// A [`ConfigError`] if the certificates cannot be read.
    pub fn roots(self, roots: Roots) -> Result<Self, ConfigError> {
        Self { roots, ..self }.connecting()
    }

    /// The proxy between the consumer and the server: `http://proxy:3128`, or `http://user:password@proxy:3128`. It opens a
    /// tunnel (CONNECT), so it sees neither token nor events of `https`. Defaults to none; variables of the environment are
    /// not read.
    ///
    /// # Errors
    /// A [`ConfigError`] if it is not a URL of `http`.
    pub fn proxy(self, url: SecretString) -> Result<Self, ConfigError> {
        let proxy = Some(url);
        Self { proxy, ..self }.connecting()
    }

    fn connecting(mut self) -> Result<Self, ConfigError> {
        let Self {
            url, token, roots, ..
        } = &self;
        self.client = PageClient::new(url, token, roots.clone(), self.proxy.as_ref())?;
        Ok(self)
    }

    /// The name under which [`consume`](super::consume) keeps the position in this feed. Defaults to the URL. Set a name
    /// if the URL may change: a consumer without a position under the new name begins again.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Where a consumer that has no position begins. Defaults to [`After::Begin`].
    #[must_use]
    pub fn begin(mut self, after: After) -> Self {
        self.begin = after;
        self
    }

    /// How long the server waits for an event before it returns an empty page. Defaults to 20 s; at most 60 s.
    #[must_use]
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait.min(LONGEST_WAIT);
        self
    }

    /// The time for a whole response, besides [`wait`](Self::wait). Defaults to 30 s.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The most events of a page. Defaults to 500; from 1 to 1,000.
    #[must_use]
    pub fn limit(mut self, events: u32) -> Self {
        self.limit = events.clamp(1, MOST_EVENTS);
        self
    }

    /// How long a page is retried, from its first failure on. Defaults to 60 s. `Duration::MAX`: until it succeeds.
    #[must_use]
    pub fn retry_for(mut self, time: Duration) -> Self {
        self.retry_for = time;
        self
    }

    /// The delay between retries. Defaults to `exponential(500ms, 30s)`.
    #[must_use]
    pub fn backoff(mut self, backoff: Backoff) -> Self {
        self.backoff = backoff;
        self
    }

    /// The events that follow, at most [`limit`](Self::limit). An empty page: none within [`wait`](Self::wait).
    ///
    /// Blocks for at most `wait` and `timeout`, and as much longer as failed requests are retried. The pages of
    /// [`After::End`] are empty at once: their cursor is that of the last event.
    ///
    /// # Errors
    /// A [`ReadError`].
    pub fn page(&self, after: After) -> Result<Page, ReadError> {
        loop {
            if let Some(page) = self.page_while(after, &mut || true)? {
                return Ok(page);
            }
        }
    }

    pub(super) fn feed(&self) -> &str {
        &self.name
    }

    pub(super) fn beginning(&self) -> After {
        self.begin
    }

    /// As [`page`](Self::page). `None`: not to keep going.
    pub(super) fn page_while(
        &self,
        after: After,
        keep_going: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Page>, ReadError> {
        let (mut failures, mut failing_since) = (0, None);
        while keep_going() {
            let (reason, at_least) = match self.ask(after) {
                Ok(page) => return Ok(Some(page)),
                Err(NoPage::ForGood(error)) => return Err(error),
                Err(NoPage::ForNow { reason, after }) => (reason, after),
            };
            failures += 1;
            let backoff = self.backoff.delay(failures, fastrand::f64());
            let delay = backoff.max(at_least.unwrap_or_default());
            let since = *failing_since.get_or_insert_with(Instant::now);
            if since.elapsed().saturating_add(delay) > self.retry_for {
                return Err(ReadError::Unavailable { reason });
            }
            log::warn!(event = "feed_retried", feed = self.name.as_str(), error = reason.as_str(); "cannot read the feed {}: {reason}; retrying in {} ms", self.name, delay.as_millis());
            pause(delay, keep_going);
        }
        Ok(None)
    }

    fn ask(&self, after: After) -> Result<Page, NoPage> {
        let mut url = self.url.clone();
        // Behind a wait, the end would be another one.
        let wait = match after {
            After::End => Duration::ZERO,
            After::Begin | After::Cursor(_) | After::Time(_) => self.wait,
        };
        let within = wait.saturating_add(self.timeout);
        let wait = humantime::format_duration(wait).to_string();
        url.query_pairs_mut()
            .append_pair("after", &after.to_string())
            .append_pair("limit", &self.limit.to_string())
            .append_pair("wait", &wait.replace(' ', ""));
        let answer = match self.client.get(&url, within) {
            Ok(answer) => answer,
            Err(PageLost::TooLarge) => return Err(not_a_page("it is larger than 64 MiB").into()),
            Err(PageLost::Failed(reason)) => {
                return Err(NoPage::ForNow {
                    reason,
                    after: None,
                });
            }
        };
        match answer.status {
            200 => Ok(self::page(after, &answer)?),
            _ => Err(refused(&answer)),
        }
    }
}

/// Waits so long, unless it is not to keep going.
pub(super) fn pause(time: Duration, keep_going: &mut dyn FnMut() -> bool) {
    let began = Instant::now();
    while keep_going() {
        match time.saturating_sub(began.elapsed()) {
            Duration::ZERO => return,
            left => std::thread::sleep(left.min(GLANCE)),
        }
    }
}

/// A problem of the server (RFC 9457).
#[derive(Default, Deserialize)]
#[serde(default)]
struct FeedProblem {
    title: String,
    detail: String,
    first_position: Option<i64>,
    last_position: Option<i64>,
}

fn refused(answer: &PageAnswer) -> NoPage {
    let status = answer.status;
    let problem: FeedProblem = serde_json::from_slice(&answer.body).unwrap_or_default();
    let detail = match (problem.detail, problem.title) {
        _ if (300..400).contains(&status) => "redirects are not followed".to_owned(),
        (detail, title) if detail.is_empty() => title,
        (detail, _) => detail,
    };
    let detail = detail.chars().take(LONGEST_DETAIL).collect();
    match (status, problem.first_position, problem.last_position) {
        (410, Some(first_position), _) => ReadError::Expired { first_position }.into(),
        (409, _, Some(last_position)) => ReadError::Changed { last_position }.into(),
        (408 | 425 | 429 | 500.., _, _) => NoPage::ForNow {
            reason: format!("the server returned {status}: {detail}"),
            after: answer.retry_after,
        },
        _ => ReadError::Refused { status, detail }.into(),
    }
}

fn not_a_page(reason: impl Into<String>) -> ReadError {
    let reason = reason.into();
    ReadError::NotAPage { reason }
}

/// The page of a response, if it continues the cursor.
fn page(after: After, answer: &PageAnswer) -> Result<Page, ReadError> {
    let header = |name: &str| answer.headers.get(name)?.to_str().ok();
    let content_type = header("content-type").unwrap_or_default();
    if !content_type.starts_with("application/cloudevents-batch+json") {
        return Err(not_a_page("it is no batch of CloudEvents"));
    }
    let headers = Headers::new([("content-type", content_type)]);
    let events = events(&headers, &answer.body).map_err(|error| not_a_page(error.to_string()))?;
    let next = header(NEXT).and_then(|text| text.parse::<Cursor>().ok());
    let next = next.ok_or_else(|| not_a_page(format!("it has no cursor in {NEXT}")))?;
    let mut before = match after {
        After::Cursor(cursor) => Some(cursor),
        After::Begin | After::End | After::Time(_) => None,
    };
    for event in &events {
        let this = cursor_of(event)?;
        if let Some(before) = before
            && this.position() != before.position().saturating_add(1)
        {
            return Err(ReadError::Hole {
                expected: before.position().saturating_add(1),
                found: this.position(),
            });
        }
        before = Some(this);
    }
    if before.is_some_and(|last| !last.is_of(&next)) {
        return Err(not_a_page(format!(
            "its cursor in {NEXT} is not that of its last event"
        )));
    }
    let events = events.into_iter().map(CloudEvent::into_owned).collect();
    Ok(Page { events, next })
}

/// The cursor of an event of a feed.
pub(super) fn cursor_of(event: &CloudEvent<'_>) -> Result<Cursor, ReadError> {
    let position = event.position();
    let position = position.ok_or_else(|| not_a_page("an event has no position"))?;
    let id = event.id.parse().ok();
    let id = id.ok_or_else(|| not_a_page("the id of an event is no UUID"))?;
    let stored_at = event.stored_at().map(|time| from_micros(as_micros(time)).0);
    Ok(Cursor::new(position, Some(Mark { id, stored_at })))
}

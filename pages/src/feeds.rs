//! Feeds: `GET api/v1/feeds/{name}/events`, for consumers that read events instead of being posted to.

mod waiters;

use std::time::{Duration, Instant};

use diesel_outbox::config::Config;
use diesel_outbox::endpoints::{Endpoint, EndpointKind};
use diesel_outbox::feed::Cursor;
use diesel_outbox::program::{
    self, After, Discontinued, FeedAccess, FeedPage, FeedQuery, FeedRow, Feeds, FoundPage,
};
use http::header::{ALLOW, HeaderName, LINK, RETRY_AFTER};
use http::{Method, StatusCode};
use serde_json::json;
use url::form_urlencoded::byte_serialize;
use uuid::Uuid;

pub(crate) use self::waiters::Waiters;
use crate::access::Access;
use crate::api::feed::{MOST_EVENTS, USUAL_EVENTS};
use crate::api::{Problem, decoded};
use crate::database::Database;
use crate::request::Request;
use crate::response::Response;

/// The longest wait for new events.
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// The cursor of the next request.
const NEXT: HeaderName = HeaderName::from_static("outbox-feed-next");
/// What the query takes.
const PARAMETERS: [&str; 3] = ["after", "limit", "wait"];

/// The name of the feed, if the path is that of its events.
pub(crate) fn name(path: &str) -> Option<String> {
    let name = path.strip_prefix("/feeds/")?.strip_suffix("/events")?;
    (!name.is_empty() && !name.contains('/')).then(|| decoded(name))
}

/// Where feeds are read.
pub(crate) struct FeedSite<'a> {
    pub(crate) config: &'a Config,
    pub(crate) feeds: &'a Database,
    /// Of operators. `None`: these pages are for customers.
    pub(crate) access: Option<&'a Access>,
}

/// The address of the events of a feed, as the visitor of this request reaches it below this base.
pub(crate) fn events_url(request: &Request, base: &str, feed: &str) -> String {
    let name: String = byte_serialize(feed.as_bytes()).collect();
    format!("{}{base}/api/v1/feeds/{name}/events", request.origin())
}

/// Whether an endpoint is read instead of sent to.
pub(crate) fn is_feed(one: &Endpoint) -> bool {
    one.kind == EndpointKind::Feed
}

/// What was asked.
#[derive(Debug, Clone, Copy)]
struct Query {
    after: After,
    limit: u32,
    wait: Duration,
}

/// A reader who waits for events behind a cursor.
#[derive(Debug, Clone)]
pub(crate) struct Waiting {
    pub(crate) feed: String,
    /// The tenant of the feed.
    pub(crate) tenant_id: Option<Uuid>,
    pub(crate) behind: Cursor,
    pub(crate) until: Instant,
}

impl Waiting {
    /// What it waits behind.
    fn place(&self) -> (String, i64) {
        (self.feed.clone(), self.behind.position())
    }

    /// Who shares places with it: the feeds of a tenant are one party, and each of the other feeds is one.
    fn party(&self) -> (Option<Uuid>, &str) {
        let feed = if self.tenant_id.is_some() {
            ""
        } else {
            &self.feed
        };
        (self.tenant_id, feed)
    }
}

/// An answer, or what to wait for before the same request is answered.
pub(crate) enum Answer {
    Now(Response),
    Later(Waiting),
}

/// The answer to a request for events.
pub(crate) fn ask(site: &FeedSite<'_>, request: &Request, name: &str) -> Answer {
    let page =
        query(request).and_then(|query| Ok((query, page(site, request, name, query, None)?)));
    match page {
        Ok((query, (feed, page))) if page.events.is_empty() && !query.wait.is_zero() => {
            Answer::Later(Waiting {
                feed: feed.name,
                tenant_id: feed.tenant_id,
                behind: page.next,
                until: Instant::now() + query.wait,
            })
        }
        Ok((query, (_, page))) => Answer::Now(batch(site.config, &page, query)),
        Err(refused) => Answer::Now(refused),
    }
}

/// The answer to whoever has waited.
pub(crate) fn after_wait(site: &FeedSite<'_>, request: &Request, waiting: &Waiting) -> Response {
    let behind = Some(waiting.behind);
    let page = query(request).and_then(|query| {
        let (_, page) = page(site, request, &waiting.feed, query, behind)?;
        Ok(batch(site.config, &page, query))
    });
    page.unwrap_or_else(|refused| refused)
}

/// The same, after a wait on the caller's thread.
pub(crate) fn blocking(
    site: &FeedSite<'_>,
    request: &Request,
    waiting: &Waiting,
    waiters: &Waiters,
) -> Response {
    match waiters.block(waiting.clone()) {
        Ok(()) => after_wait(site, request, waiting),
        Err(_) => too_many(),
    }
}

fn page(
    site: &FeedSite<'_>,
    request: &Request,
    name: &str,
    Query { after, limit, wait }: Query,
    waited: Option<Cursor>,
) -> Result<(FeedRow, FeedPage), Response> {
    let waits = waited.is_none() && !wait.is_zero();
    let asked = FeedQuery {
        after,
        limit,
        waits,
        waited,
    };
    let (feed, page) = found(site, request, name, asked)?;
    Ok((feed, page.map_err(discontinued)?))
}

/// Too many wait.
pub(crate) fn too_many() -> Response {
    let why = "too many readers wait for events: ask again later, or without wait";
    let refused = Response::from(Problem::new(StatusCode::TOO_MANY_REQUESTS, why));
    refused.with_header(RETRY_AFTER, "5")
}

fn batch(config: &Config, page: &FeedPage, query: Query) -> Response {
    let next = page.next.to_string();
    let Query { limit, wait, .. } = query;
    let wait = humantime::format_duration(wait)
        .to_string()
        .replace(' ', "%20");
    let link = format!("<?after={next}&limit={limit}&wait={wait}>; rel=\"next\"");
    Response::events(program::as_batch(config, page))
        .with_header(NEXT, &next)
        .with_header(LINK, &link)
}

fn discontinued(why: Discontinued) -> Response {
    let (status, kind, title, detail, (member, position)) = match why {
        Discontinued::Expired { first_position } => (
            StatusCode::GONE,
            "position-expired",
            "The position is too old",
            "events behind the cursor, or since the time, were removed: continue with after=begin, which skips them",
            ("first_position", first_position),
        ),
        Discontinued::Changed { last_position } => (
            StatusCode::CONFLICT,
            "feed-changed",
            "The feed has other events now",
            "the feed has another event at the position of the cursor, or none: its database was restored. Continue with \
             after=TIME, before the last event that you have, and skip ids that you know",
            ("last_position", last_position),
        ),
    };
    let problem = json!({
        "type": kind, "title": title, "status": status.as_u16(), "detail": detail, member: position,
    });
    Response::json(status, problem.to_string().into_bytes())
}

fn away(error: anyhow::Error) -> Response {
    log::warn!(event = "pages_failed", error:% = format!("{error:#}"); "a feed could not be read: {error:#}");
    let why = "the database does not answer: send the same request again";
    Response::from(Problem::new(StatusCode::SERVICE_UNAVAILABLE, why)).with_header(RETRY_AFTER, "5")
}

/// The feed and its page, if the request may read it. Whoever may not does not learn whether it is there.
fn found(
    site: &FeedSite<'_>,
    request: &Request,
    name: &str,
    asked: FeedQuery,
) -> Result<FoundPage, Response> {
    let feeds = Feeds::of(&site.config.table);
    // The readers of one feed leave connections to those of others.
    let read = |access| {
        let found = site
            .feeds
            .within(None, name, |conn, _| feeds.read(conn, access, name, asked));
        found.map_err(away)
    };
    let refused = || {
        let why = "send Authorization: Bearer with a token of this feed, from whoever registered it: the token may have ended, or the feed was removed";
        Response::from(Problem::new(StatusCode::UNAUTHORIZED, why))
    };
    if let Some(identity) = &request.visitor.identity {
        if !identity.rights.payloads {
            let why = "you may not see content";
            return Err(Problem::new(StatusCode::FORBIDDEN, why).into());
        }
        let access = identity.tenant.map_or(FeedAccess::All, FeedAccess::Tenant);
        return read(access)?.ok_or_else(|| Problem::missing().into());
    }
    let Some(token) = request.bearer() else {
        return Err(refused());
    };
    if let Some(found) = read(FeedAccess::Token(token))? {
        return Ok(found);
    }
    let Some(access) = site.access.filter(|access| access.admin.token.is_some()) else {
        return Err(refused());
    };
    // The operators' token, or a wrong one.
    access.bearer(request).map_err(Problem::of)?;
    if !access.admin.payloads {
        let why = "OUTBOX_ADMIN_PAYLOADS=true lets operators see content; a token of the feed is never refused for it";
        return Err(Problem::new(StatusCode::FORBIDDEN, why).into());
    }
    read(FeedAccess::All)?.ok_or_else(refused)
}

fn query(request: &Request) -> Result<Query, Response> {
    if !matches!(request.method, Method::GET | Method::HEAD) {
        let refused = Problem::new(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD");
        return Err(Response::from(refused).with_header(ALLOW, "GET, HEAD"));
    }
    Ok(asked(request)?)
}

fn asked(request: &Request) -> Result<Query, Problem> {
    let wrong =
        |name: &'static str, why: String| Problem::new(StatusCode::BAD_REQUEST, why).of_field(name);
    if let Some(unknown) = (request.query.names()).find(|name| !PARAMETERS.contains(name)) {
        let why = format!("there is no parameter {unknown:?}: after, limit and wait");
        return Err(Problem::new(StatusCode::BAD_REQUEST, why));
    }
    let given = |name: &'static str| {
        let mut all = request.query.all(name);
        match (all.next(), all.next()) {
            (Some(_), Some(_)) => Err(wrong(name, format!("{name} is given twice"))),
            (Some(""), None) => Err(wrong(name, format!("{name} is empty"))),
            (one, _) => Ok(one.map(str::trim)),
        }
    };
    let after = given("after")?.map_or(Ok(After::Begin), str::parse);
    let after = after.map_err(|_| {
        let why = "after must be begin, end, a time such as 2026-11-21T10:00:00Z (%2B for a +), or what outbox-feed-next has said";
        wrong("after", why.to_owned())
    })?;
    let limit = given("limit")?.map_or(Ok(USUAL_EVENTS), str::parse);
    let limit = limit.ok().filter(|limit| (1..=MOST_EVENTS).contains(limit));
    let limit = limit.ok_or_else(|| {
        wrong(
            "limit",
            format!("limit must be a number from 1 to {MOST_EVENTS}"),
        )
    })?;
    let wait = given("wait")?.map_or(Ok(Duration::ZERO), |text| {
        program::parse_duration("wait", text)
    });
    let wait = wait.ok().filter(|wait| *wait <= LONGEST_WAIT);
    let wait =
        wait.ok_or_else(|| wrong("wait", "wait must be 0s to 60s, such as 20s".to_owned()))?;
    Ok(Query { after, limit, wait })
}

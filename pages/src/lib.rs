//! The operators' pages of an outbox, its health and its metrics: a function from request to response, which knows no
//! socket. `diesel-outbox run` and `diesel-outbox admin` serve it.
//!
//! The pages have their own connections and a thread of their own, so that they cannot block the relay. Hidden modules
//! are for the commands of the program, and may change with any version.
//!
//! ```no_run
//! use diesel_outbox::config;
//! use diesel_outbox_pages::{Pages, Rights, Visitor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let config = config::from_env()?;
//! let pages = Pages::operators(&config, config.database_url()?, None)?
//!     .cookie("shop_outbox")
//!     .metrics(|| "# What the recorder of this process has recorded\n".to_owned());
//! let request = http::Request::get("/dead").header("host", "localhost");
//! // The application has checked who this is.
//! let ann = Visitor::known("ann", Rights::look());
//! let response = pages.respond(request.body(Vec::new())?, ann);
//! assert_eq!(response.status(), 200);
//! # Ok(())
//! # }
//! ```

mod access;
mod api;
mod base;
mod database;
mod feeds;
mod health;
mod history;
mod kept;
mod key;
mod labels;
#[doc(hidden)]
pub mod message;
mod pages;
#[doc(hidden)]
pub mod pause;
mod portal;
mod request;
mod response;
mod server;
#[doc(hidden)]
pub mod text;
mod visitor;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use diesel_outbox::config::Config;
use diesel_outbox::program::{self, DepthGauges};
use diesel_outbox::{ConfigError, RelayHandle};
use http::header::{ALLOW, SET_COOKIE};
use http::{Method, StatusCode};

use self::access::{Access, Guest};
use self::database::Database;
use self::feeds::FeedSite;
use self::history::{Glance, History, Sampler};
use self::kept::Kept;
use self::pages::{DeadList, Visit};
use self::request::{Form, Request};
use self::response::Response;

pub use self::database::Connections;
pub use self::portal::{Language, Portal, portal_routes};
pub use self::server::serve;
pub use self::visitor::{Rights, Visitor};

/// The target of audit log lines: who did what.
const AUDIT: &str = "diesel_outbox::audit";

/// The pages of one outbox.
pub struct Pages {
    site: Site,
    _sampler: Sampler,
}

/// Why pages cannot be made.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PagesError {
    /// A setting has a value that cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The system returned no random bytes, which sessions and forms need.
    #[error("the system returned no random bytes: {0}")]
    Random(#[from] getrandom::Error),
    /// The key has this many bytes, too few.
    #[error("the key of the pages has {0} bytes: at least 32 are required")]
    ShortKey(usize),
    /// The thread that samples the outbox cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(#[source] std::io::Error),
}

impl Pages {
    /// The operators' pages of the outbox in these settings. `connections`: the URL of the database, such as that of the
    /// settings, or a function that lends a connection of the application; the pages use at most six at the same time,
    /// each for a transaction. `relay`: the relay of this process, if it has one. The first request connects to the
    /// database.
    ///
    /// ```no_run
    /// use diesel::PgConnection;
    /// use diesel::r2d2::{ConnectionManager, Pool};
    /// use diesel_outbox::config::Config;
    /// use diesel_outbox_pages::Pages;
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let pool = Pool::new(ConnectionManager::<PgConnection>::new("postgres://localhost/shop"))?;
    /// let pages = Pages::operators(&Config::default(), move || pool.get(), None)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// The system has no random bytes or no thread left.
    pub fn operators(
        config: &Config,
        connections: impl Into<Connections>,
        relay: Option<Arc<RelayHandle>>,
    ) -> Result<Self, PagesError> {
        let source = &connections.into();
        let database =
            |purpose, connections| Database::several(source, &config.table, purpose, connections);
        let destinations = program::all_destinations(config);
        let names = destinations.iter().map(|one| one.name.as_str());
        let feeds = Arc::new(database("admin feeds", 4));
        let site = Site {
            relay,
            database: database("admin", 1),
            searches: database("admin searches", 2),
            changes: database("admin changes", 2),
            waiters: waiters(config, &feeds),
            feeds,
            history: Arc::default(),
            dead: Kept::default(),
            access: Access::new(program::admin(config).clone())?,
            depths: Mutex::new(DepthGauges::new(&config.table.to_string(), names)),
            metrics: None,
            config: config.clone(),
        };
        let sampler = Sampler::start(source, &config.table, &site.history)?;
        Ok(Self {
            site,
            _sampler: sampler,
        })
    }

    /// The name of the session's cookie. Browsers share cookies between the ports of a host, so two outboxes on one host
    /// need two names. By default the name comes from the key.
    #[must_use]
    pub fn cookie(mut self, name: impl Into<String>) -> Self {
        self.site.access.cookie = Some(name.into());
        self
    }

    /// The path below which the application mounts the pages, such as `/admin/outbox`. Defaults to
    /// `OUTBOX_ADMIN_BASE`.
    ///
    /// ```no_run
    /// use diesel_outbox_pages::Pages;
    ///
    /// let config = diesel_outbox::config::from_env()?;
    /// let pages = Pages::operators(&config, config.database_url()?, None)?
    ///     .base("/admin/outbox")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// This is not a path.
    pub fn base(mut self, path: &str) -> Result<Self, PagesError> {
        self.site.config.set("OUTBOX_ADMIN_BASE", path)?;
        self.site.access.admin = program::admin(&self.site.config).clone();
        Ok(self)
    }

    /// The secret that signs sessions and forms, of at least 32 bytes: processes with the same key accept each other's.
    /// Defaults to the token, or without one to a random key of this process.
    ///
    /// ```no_run
    /// use diesel_outbox_pages::Pages;
    ///
    /// let config = diesel_outbox::config::from_env()?;
    /// let pages = Pages::operators(&config, config.database_url()?, None)?
    ///     .key(std::env::var("PAGES_KEY")?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The key is too short.
    pub fn key(mut self, key: impl AsRef<[u8]>) -> Result<Self, PagesError> {
        self.site.access.set_key(key.as_ref())?;
        Ok(self)
    }

    /// Serves `/metrics` with the text of this function: what the recorder of this process has recorded, in the format of
    /// Prometheus. The outbox's gauges are recorded before each call. Without it, there is no such page.
    #[must_use]
    pub fn metrics(mut self, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.site.metrics = Some(Box::new(render));
        self
    }

    /// The response to a request of this visitor. May take as long as the database, up to some minutes for large
    /// changes. A reader of a feed that waits for events (`wait=20s`) occupies the caller's thread, and no connection; at most
    /// `OUTBOX_FEED_WAITERS` wait. The body of the response to a HEAD request is for the server to leave out.
    pub fn respond(
        &self,
        request: http::Request<Vec<u8>>,
        visitor: Visitor,
    ) -> http::Response<Vec<u8>> {
        match self.reply(request, visitor) {
            Reply::Now(response) => response,
            Reply::Later(Later { request, waiting }) => {
                let (site, waiters) = (self.site.feeds(), &self.site.waiters);
                feeds::blocking(&site, &request, &waiting, waiters).into()
            }
        }
    }

    /// The same for a server that has something better to do than to wait.
    #[doc(hidden)]
    pub fn reply(&self, request: http::Request<Vec<u8>>, visitor: Visitor) -> Reply {
        let base = &self.site.access.admin.base;
        let path = request.uri().path().to_owned();
        let request = match Request::new(request, visitor, base) {
            Ok(request) => request,
            Err(refused) => return Reply::Now(self.with_base(api::refused(&path, refused))),
        };
        match feed_of(&request).map(|name| feeds::ask(&self.site.feeds(), &request, &name)) {
            None => Reply::Now(self.with_base(self.site.answer(&request))),
            Some(feeds::Answer::Now(response)) => Reply::Now(response.into()),
            Some(feeds::Answer::Later(waiting)) => Reply::Later(Later { request, waiting }),
        }
    }

    /// Calls `wake` once, when the reader has waited enough. A response: too many wait.
    #[doc(hidden)]
    pub fn wait(
        &self,
        later: &Later,
        wake: impl FnOnce() + Send + 'static,
    ) -> Option<http::Response<Vec<u8>>> {
        let waits = self.site.waiters.wait(later.waiting.clone(), wake);
        waits.err().map(|_| feeds::too_many().into())
    }

    /// The response to whoever has waited.
    #[doc(hidden)]
    pub fn finish(&self, later: &Later) -> http::Response<Vec<u8>> {
        feeds::after_wait(&self.site.feeds(), &later.request, &later.waiting).into()
    }

    fn with_base(&self, response: Response) -> http::Response<Vec<u8>> {
        let base = &self.site.access.admin.base;
        let is_page = response.is_page();
        let mut response = response.into();
        base::add(base, &mut response, is_page);
        response
    }
}

/// What answers a request: a response, or the wait for one.
#[doc(hidden)]
pub enum Reply {
    /// The response.
    Now(http::Response<Vec<u8>>),
    /// A reader waits for events of a feed.
    Later(Later),
}

/// A reader who waits.
#[doc(hidden)]
#[derive(Debug)]
pub struct Later {
    request: Request,
    waiting: feeds::Waiting,
}

/// The feed whose events were asked for.
fn feed_of(request: &Request) -> Option<String> {
    feeds::name(api::path(request)?)
}

fn waiters(config: &Config, feeds: &Arc<Database>) -> feeds::Waiters {
    let (feeds, table) = (Arc::clone(feeds), config.table.clone());
    feeds::Waiters::new(config.feed_waiters, move |waiting| {
        let of = program::Feeds::of(&table);
        let found = feeds.run(|conn, _| of.changed(conn, waiting));
        found.map(|found| found.into_iter().collect())
    })
}

/// What `/readyz` of a [`MetricsPage`] says.
///
/// ```
/// let some = diesel_outbox_pages::Readiness {
///     is_ready: true,
///     summary: "ok: serving 1 of 2 databases".to_owned(),
///     details: "not served: acme".to_owned(),
/// };
/// assert!(some.is_ready);
/// ```
#[derive(Debug, Clone)]
pub struct Readiness {
    /// Whether the response is 200, and not 503.
    pub is_ready: bool,
    /// What anyone may read.
    pub summary: String,
    /// What those may read who may read the metrics; empty: nothing.
    pub details: String,
}

/// Health and metrics without pages, for a process that serves many databases: `/livez`, `/readyz` and `/metrics`. The
/// settings of the pages say who may read the metrics.
///
/// ```
/// use diesel_outbox::config::Config;
/// use diesel_outbox_pages::{MetricsPage, Readiness, Visitor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let ready = || Readiness { is_ready: true, summary: "ok".to_owned(), details: String::new() };
/// let page = MetricsPage::new(&Config::default(), || "# metrics\n".to_owned(), ready)?;
/// let request = http::Request::get("/metrics").header("host", "localhost");
/// let response = page.respond(request.body(Vec::new())?, Visitor::unknown([127, 0, 0, 1].into()));
/// assert_eq!(response.body(), b"# metrics\n");
/// # Ok(())
/// # }
/// ```
pub struct MetricsPage {
    access: Access,
    render: Box<dyn Fn() -> String + Send + Sync>,
    ready: Box<dyn Fn() -> Readiness + Send + Sync>,
}

impl MetricsPage {
    /// `render`: the text of the metrics. `ready`: whether the process can work.
    ///
    /// # Errors
    ///
    /// The system has no random bytes.
    pub fn new(
        config: &Config,
        render: impl Fn() -> String + Send + Sync + 'static,
        ready: impl Fn() -> Readiness + Send + Sync + 'static,
    ) -> Result<Self, PagesError> {
        Ok(Self {
            access: Access::new(program::admin(config).clone())?,
            render: Box::new(render),
            ready: Box::new(ready),
        })
    }

    /// The response to a request of this visitor.
    pub fn respond(
        &self,
        request: http::Request<Vec<u8>>,
        visitor: Visitor,
    ) -> http::Response<Vec<u8>> {
        let request = Request::new(request, visitor, &self.access.admin.base);
        let (Ok(response) | Err(response)) = request.and_then(|request| self.answer(&request));
        response.into()
    }

    fn answer(&self, request: &Request) -> Result<Response, Response> {
        match request.path.as_str() {
            "/livez" => Ok(Response::text(StatusCode::OK, "ok\n")),
            "/readyz" => Ok(health::of_many(
                &(self.ready)(),
                health::words(&self.access, request),
            )),
            "/metrics" => {
                self.access.check_host(request)?;
                self.access.script(request)?;
                Ok(Response::metrics((self.render)()))
            }
            _ => Err(Response::text(
                StatusCode::NOT_FOUND,
                "this process has /livez, /readyz and /metrics\n",
            )),
        }
    }
}

/// A plain-text response with the headers that all pages share, for requests that a server refuses before the pages see
/// them.
///
/// ```
/// let refused = diesel_outbox_pages::plain(http::StatusCode::PAYLOAD_TOO_LARGE, "too large\n");
/// assert_eq!(refused.headers()["cache-control"], "no-store");
/// ```
pub fn plain(status: StatusCode, text: impl Into<Vec<u8>>) -> http::Response<Vec<u8>> {
    Response::text(status, text).into()
}

/// The paths of the operators' pages, for tests that try all of them.
#[doc(hidden)]
pub fn operator_pages() -> impl Iterator<Item = &'static str> {
    pages::PAGES.iter().map(|(path, _)| *path)
}

/// The state that all pages share.
struct Site {
    config: Config,
    /// The relay of this process, if it has one.
    relay: Option<Arc<RelayHandle>>,
    /// For the queries of the pages. With one connection, pages queue for each other and never delay the relay.
    database: Database,
    /// For searches, which can take seconds. One page uses one connection, so a slow page delays no other.
    searches: Database,
    /// For changes, which can take even longer. The same holds for acts.
    changes: Database,
    /// For readers of feeds.
    feeds: Arc<Database>,
    waiters: feeds::Waiters,
    history: Arc<History>,
    /// Cached lists of dead letters: grouping them by cause reads all of them.
    dead: Kept<Arc<DeadList>>,
    access: Access,
    /// Gauges for a process without a relay; a relay sets its own.
    depths: Mutex<DepthGauges>,
    metrics: Option<Box<dyn Fn() -> String + Send + Sync>>,
}

impl Site {
    fn feeds(&self) -> FeedSite<'_> {
        FeedSite {
            config: &self.config,
            feeds: &self.feeds,
            access: Some(&self.access),
        }
    }

    fn answer(&self, request: &Request) -> Response {
        self.route(request)
            .unwrap_or_else(|refused| pages::refused(self, request, refused))
    }

    /// The outbox at a glance, from a new query or from a recent one of another request. If the database fails,
    /// returns the last known glance and the error.
    fn glance(&self) -> (Option<Arc<Glance>>, Option<String>) {
        if let Some(glance) = self.history.young() {
            return (Some(glance), None);
        }
        let looked = self.database.run(|conn, outbox| {
            // Another request may have queried while this one waited for the connection.
            if let Some(glance) = self.history.young() {
                return Ok(glance);
            }
            let began = Instant::now();
            Ok(self.history.keep(Glance::look(conn, outbox)?, began))
        });
        match looked {
            Ok(glance) => (Some(glance), None),
            Err(error) => (self.history.latest(), Some(format!("{error:#}"))),
        }
    }

    /// The same, if the database answers.
    fn glance_now(&self) -> anyhow::Result<Arc<Glance>> {
        match self.glance() {
            (Some(glance), None) => Ok(glance),
            (_, error) => Err(anyhow::Error::msg(error.unwrap_or_default())),
        }
    }

    /// Drops everything read before a change, so that no page shows it afterwards.
    fn forget(&self) {
        self.history.forget();
        self.dead.forget();
    }

    /// Both variants are responses; an `Err` returns early.
    fn route(&self, request: &Request) -> Result<Response, Response> {
        // Probes connect by address, and their responses hold no secrets.
        match request.path.as_str() {
            "/livez" => return Ok(health::alive(self, health::words(&self.access, request))),
            "/readyz" => return Ok(health::ready(self, health::words(&self.access, request))),
            _ if let Some(path) = api::path(request) => {
                return Ok(pages::api::answer(self, request, path));
            }
            _ => self.access.check_host(request)?,
        }
        let is_known = request.visitor.identity.is_some();
        match (&request.method, request.path.as_str()) {
            (&Method::POST, "/login") if !is_known => self.log_in(request),
            (_, "/login") if !is_known => Ok(pages::login(self, request)),
            (_, "/metrics") if let Some(render) = &self.metrics => {
                self.access.script(request)?;
                Ok(self.metrics(render))
            }
            (&(Method::GET | Method::HEAD), path) => {
                if let Some(asset) = pages::asset(path) {
                    return Ok(asset);
                }
                let guest = self.access.guest(request)?;
                Ok(self.visited(&guest, request, &request.query))
            }
            (&Method::POST, path) => {
                let guest = self.access.guest(request)?;
                if path == "/logout" && guest.has_session {
                    self.access.check_origin(request)?;
                    let cookie = self.access.log_out(request);
                    return Ok(Response::see_other("/login").with_header(SET_COOKIE, &cookie));
                }
                let form = request.form();
                let form_token = form.get("form_token").unwrap_or_default();
                self.access.check_change(request, &guest, form_token)?;
                Ok(self.visited(&guest, request, &form))
            }
            _ => {
                let why = "only GET, HEAD and POST are supported\n";
                let refused = Response::text(StatusCode::METHOD_NOT_ALLOWED, why);
                Ok(refused.with_header(ALLOW, "GET, HEAD, POST"))
            }
        }
    }

    fn visited(&self, guest: &Guest, request: &Request, form: &Form) -> Response {
        pages::answer(&Visit {
            site: self,
            guest,
            request,
            form,
            act: None,
        })
    }

    fn metrics(&self, render: &dyn Fn() -> String) -> Response {
        if let Some(relay) = &self.relay {
            relay.record_metrics();
            return Response::metrics(render());
        }
        match self.glance() {
            (Some(glance), None) => {
                let gauges = self.depths.lock();
                gauges
                    .unwrap_or_else(PoisonError::into_inner)
                    .show(&glance.depths);
                Response::metrics(render())
            }
            // Old values would look current.
            (_, error) => {
                let error = error.unwrap_or_else(|| "no data yet".to_owned());
                Response::text(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n"))
            }
        }
    }

    fn log_in(&self, request: &Request) -> Result<Response, Response> {
        let cookie = self.access.log_in(request)?;
        // Only a path on this server: nothing that a browser could read as another server.
        let form = request.form();
        let next = form.get("next").filter(|next| {
            let is_own = next.starts_with('/') && !next.starts_with("//") && !next.contains('\\');
            // Browsers remove tabs and newlines, which would turn `/<tab>/` into `//`.
            is_own && next.bytes().all(|b| b.is_ascii_graphic())
        });
        Ok(Response::see_other(next.unwrap_or("/")).with_header(SET_COOKIE, &cookie))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages without a database.
    fn pages() -> Pages {
        let none = || Err::<Box<diesel::PgConnection>, _>("no database in this test");
        Pages::operators(&Config::default(), none, None).expect("pages")
    }

    fn post(pages: &Pages, path: &str, visitor: &Visitor) -> StatusCode {
        let identity = visitor.identity.as_ref().expect("known");
        let guest = pages.site.access.known(identity, visitor.peer);
        let request = http::Request::post(path)
            .header("host", "localhost")
            .header("origin", "https://localhost");
        let form = format!("form_token={}", guest.form_token).into_bytes();
        let request = request.body(form).expect("a request");
        pages.respond(request, visitor.clone()).status()
    }

    /// R60: an application that passes strangers on, and has no token, makes nobody an operator.
    #[test]
    fn without_a_token_only_visitors_from_this_machine_are_let_in() {
        let pages = pages().metrics(String::new);
        let shown = |peer: [u8; 4], path: &str| {
            let request = http::Request::get(path).header("host", "localhost");
            let request = request.body(Vec::new()).expect("a request");
            pages
                .respond(request, Visitor::unknown(peer.into()))
                .status()
        };
        for path in operator_pages().chain(["/dead/1", "/metrics"]) {
            assert_eq!(shown([192, 0, 2, 7], path), StatusCode::FORBIDDEN, "{path}");
            assert_ne!(shown([127, 0, 0, 1], path), StatusCode::FORBIDDEN, "{path}");
        }
    }

    /// R60: over every route that changes something.
    #[test]
    fn without_the_right_to_act_nothing_is_changed() {
        let pages = pages();
        let looks = Rights::all().with_act(false);
        let tenant = Visitor::of_tenant(uuid::Uuid::nil(), "ann", Rights::all());
        for path in operator_pages().chain(["/dead/1"]) {
            let request = http::Request::get(path).body(Vec::new());
            let request = request.expect("a request");
            let shown = pages.respond(request, tenant.clone());
            assert_eq!(shown.status(), StatusCode::FORBIDDEN, "{path}");
        }
        for path in pages::changes() {
            let may = post(&pages, path, &Visitor::known("ann", Rights::all()));
            assert_ne!(may, StatusCode::FORBIDDEN, "{path}");
            assert_ne!(may, StatusCode::NOT_FOUND, "{path}");
            let may_not = post(&pages, path, &Visitor::known("ann", looks));
            assert_eq!(may_not, StatusCode::FORBIDDEN, "{path}");
            assert_eq!(post(&pages, path, &tenant), StatusCode::FORBIDDEN, "{path}");
        }
    }
}

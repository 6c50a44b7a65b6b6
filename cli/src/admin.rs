//! The admin page, health and metrics over HTTP: for people on call, probes and Prometheus.
//!
//! It has threads and connections of its own, so that it cannot slow the relay.

mod access;
mod database;
mod health;
mod history;
mod http;
mod kept;
mod metrics;
mod pages;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use crossbeam_channel::{Sender, bounded};
use diesel_outbox::{Config, RelayHandle};

pub(crate) use self::access::Visitor;
pub(crate) use self::database::Database;
pub(crate) use self::http::{Request, Response};

use self::access::Access;
use self::health::Words;
use self::history::{Glance, History, Sampler};
use self::http::{Method, Server, Status};
use self::kept::Kept;
use self::metrics::Metrics;
use self::pages::DeadList;

/// The target of log lines about who has done what.
pub(crate) const AUDIT: &str = "diesel_outbox::audit";

/// An address that is taken and not served yet.
pub(crate) struct Bound {
    listener: TcpListener,
    config: Config,
    metrics: Metrics,
}

/// What the pages show and change.
pub(crate) struct Site {
    pub(crate) config: Config,
    /// The relay of this process, if it has one.
    pub(crate) relay: Option<Arc<RelayHandle>>,
    /// For looking. One connection: pages queue up before the database, and never before the relay.
    pub(crate) database: Database,
    /// For searches, which can take seconds.
    pub(crate) searches: Database,
    /// For changes, which can take longer.
    pub(crate) changes: Database,
    pub(crate) history: Arc<History>,
    /// Dead letters: what they died of is a look at all of them.
    pub(crate) dead: Kept<Arc<DeadList>>,
    access: Access,
    metrics: Metrics,
}

/// A page that is served, until this is dropped.
pub(crate) struct Page {
    server: Server,
    _sampler: Sampler,
    /// Disconnected at the end.
    _stop: Sender<()>,
}

impl Page {
    pub(crate) fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

impl Bound {
    /// Takes the address, and begins to count: metrics of a relay that starts later are seen.
    /// `None`: no page is wanted.
    pub(crate) fn new(config: &Config) -> Result<Option<Self>> {
        let Some(addr) = config.admin.addr else {
            return Ok(None);
        };
        let listener = TcpListener::bind(addr)
            .with_context(|| format!("OUTBOX_ADMIN_ADDR: cannot listen on {addr}"))?;
        Ok(Some(Self {
            listener,
            config: config.clone(),
            metrics: Metrics::install(config)?,
        }))
    }

    pub(crate) fn serve(self, relay: Option<Arc<RelayHandle>>) -> Result<Page> {
        let port = self.listener.local_addr().context("no address")?.port();
        let config = self.config;
        let site = Arc::new(Site {
            relay,
            database: Database::new(&config, "admin")?,
            searches: Database::new(&config, "admin searches")?,
            changes: Database::new(&config, "admin changes")?,
            history: Arc::default(),
            dead: Kept::default(),
            access: Access::new(config.admin.clone(), port)?,
            metrics: self.metrics,
            config,
        });
        let sampler = Sampler::start(&site.config, &site.history)?;
        let (stop, stopped) = bounded(0);
        let counting = Arc::clone(&site);
        std::thread::Builder::new()
            .name("admin-metrics".to_owned())
            .spawn(move || counting.metrics.sum_up_until(&stopped))
            .context("cannot start a thread")?;
        let server = Server::start(self.listener, Arc::new(move |request| site.answer(request)))?;
        let page = Page {
            server,
            _sampler: sampler,
            _stop: stop,
        };
        log::info!(event = "admin_started", address:% = page.address(); "the admin page is at http://{}/", page.address());
        Ok(page)
    }
}

impl Site {
    fn answer(&self, request: &Request) -> Response {
        self.route(request)
            .unwrap_or_else(|refused| pages::refused(self, request, refused))
    }

    /// The outbox at a glance: just looked at, or by somebody else a moment ago. Where the database does
    /// not answer, what was seen last, and the error.
    pub(crate) fn glance(&self) -> (Option<Arc<Glance>>, Option<String>) {
        if let Some(glance) = self.history.young() {
            return (Some(glance), None);
        }
        let looked = self.database.run(|conn, outbox| {
            // Somebody else may have looked while this one waited.
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

    /// What was seen before a change is not shown after it.
    pub(crate) fn forget(&self) {
        self.history.forget();
        self.dead.forget();
    }

    /// Both sides are answers; an `Err` ends early.
    fn route(&self, request: &Request) -> Result<Response, Response> {
        // Probes come by an address, and tell no secrets.
        match request.path.as_str() {
            "/livez" => return Ok(health::alive(self, self.words(request))),
            "/readyz" => return Ok(health::ready(self, self.words(request))),
            _ => self.access.check_host(request)?,
        }
        match (request.method, request.path.as_str()) {
            (Method::Post, "/login") => self.log_in(request),
            (_, "/login") => Ok(pages::login(self, request)),
            (_, "/metrics") => {
                self.access.script(request)?;
                Ok(self.metrics())
            }
            (Method::Get | Method::Head, path) => {
                if let Some(asset) = pages::asset(path) {
                    return Ok(asset);
                }
                let visitor = self.access.visitor(request)?;
                Ok(pages::show(self, &visitor, request))
            }
            (Method::Post, path) => {
                let visitor = self.access.visitor(request)?;
                if path == "/logout" {
                    self.access.check_origin(request)?;
                    let cookie = self.access.log_out(request);
                    return Ok(Response::see_other("/login").with_header("set-cookie", &cookie));
                }
                self.access.check_change(request, &visitor)?;
                Ok(pages::change(self, &visitor, request))
            }
        }
    }

    fn metrics(&self) -> Response {
        if let Some(relay) = &self.relay {
            return self.metrics.of_relay(relay);
        }
        match self.glance() {
            (Some(glance), None) => self.metrics.of_depths(&glance.depths),
            // What was seen before would look as if it were so now.
            (_, error) => {
                let error = error.unwrap_or_else(|| "nothing is known yet".to_owned());
                Response::text(Status::Unavailable, format!("{error}\n"))
            }
        }
    }

    /// A name that somebody else lets lead here would let their pages read it.
    fn words(&self, request: &Request) -> Words {
        let is_known =
            self.access.check_host(request).is_ok() && self.access.script(request).is_ok();
        if is_known { Words::All } else { Words::Names }
    }

    fn log_in(&self, request: &Request) -> Result<Response, Response> {
        let cookie = self.access.log_in(request)?;
        // A path of this server, and nothing that a browser could take for another one.
        let form = request.form();
        let next = form.get("next").filter(|next| {
            let is_own = next.starts_with('/') && !next.starts_with("//") && !next.contains('\\');
            // Browsers leave out what stands between two slashes and is none of these.
            is_own && next.bytes().all(|b| b.is_ascii_graphic())
        });
        Ok(Response::see_other(next.unwrap_or("/")).with_header("set-cookie", &cookie))
    }
}

/// Options of `admin`.
pub(crate) fn run(settings: &crate::settings::SettingFlags) -> Result<()> {
    let mut config = settings.load()?;
    crate::logging::start(&config);
    let signals = crate::signals::channel()?;
    if config.admin.addr.is_none() {
        config.admin.addr = Some(SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT)));
    }
    config.database_url()?;
    let page = Bound::new(&config)?
        .map(|bound| bound.serve(None))
        .transpose()?;
    // Ends as well where nobody is left who could send one.
    let _ = signals.recv();
    drop(page);
    Ok(())
}

/// Of `diesel-outbox admin` without an address.
const DEFAULT_PORT: u16 = 8687;

//! The admin page, health and metrics over HTTP: for people on call, probes and Prometheus.
//!
//! The page has its own threads and connections, so that it cannot block the relay.

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

/// The target of audit log lines: who did what.
pub(crate) const AUDIT: &str = "diesel_outbox::audit";

/// An address that is bound but not served yet.
pub struct Bound {
    listener: TcpListener,
    config: Config,
    metrics: Metrics,
}

/// The state that all pages share.
pub(crate) struct Site {
    pub(crate) config: Config,
    /// The relay of this process, if it has one.
    pub(crate) relay: Option<Arc<RelayHandle>>,
    /// For the queries of the pages. With one connection, pages queue for each other and never delay the relay.
    pub(crate) database: Database,
    /// For searches, which can take seconds.
    pub(crate) searches: Database,
    /// For changes, which can take even longer.
    pub(crate) changes: Database,
    pub(crate) history: Arc<History>,
    /// Cached lists of dead letters: grouping them by cause reads all of them.
    pub(crate) dead: Kept<Arc<DeadList>>,
    access: Access,
    metrics: Metrics,
}

/// The served page. Dropping it stops the server.
pub struct Page {
    server: Server,
    _sampler: Sampler,
    /// Dropping it stops the metrics thread.
    _stop: Sender<()>,
}

impl Page {
    /// The address that the server listens on.
    pub fn address(&self) -> SocketAddr {
        self.server.address()
    }
}

impl Bound {
    /// Binds the address and installs the metrics recorder, so that metrics of a relay started later are recorded.
    /// `None`: no address is configured.
    ///
    /// # Errors
    ///
    /// The address cannot be bound, or this process has another metrics recorder.
    pub fn new(config: &Config) -> Result<Option<Self>> {
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

    /// Serves the page until the result is dropped. `relay`: the relay of this process, if it has one.
    ///
    /// # Errors
    ///
    /// A thread cannot be started, or no database is configured.
    pub fn serve(self, relay: Option<Arc<RelayHandle>>) -> Result<Page> {
        let port = self
            .listener
            .local_addr()
            .context("cannot read the address of the listener")?
            .port();
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

    /// The outbox at a glance, from a new query or from a recent one of another request. If the database fails,
    /// returns the last known glance and the error.
    pub(crate) fn glance(&self) -> (Option<Arc<Glance>>, Option<String>) {
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

    /// Drops everything read before a change, so that no page shows it afterwards.
    pub(crate) fn forget(&self) {
        self.history.forget();
        self.dead.forget();
    }

    /// Both variants are responses; an `Err` returns early.
    fn route(&self, request: &Request) -> Result<Response, Response> {
        // Probes connect by address, and their responses hold no secrets.
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
            // Old values would look current.
            (_, error) => {
                let error = error.unwrap_or_else(|| "no data yet".to_owned());
                Response::text(Status::Unavailable, format!("{error}\n"))
            }
        }
    }

    /// Details only for known host names: with DNS rebinding, pages of another site could read the response.
    fn words(&self, request: &Request) -> Words {
        let is_known =
            self.access.check_host(request).is_ok() && self.access.script(request).is_ok();
        if is_known { Words::All } else { Words::Names }
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
    // A disconnected channel also ends the wait.
    let _ = signals.recv();
    drop(page);
    Ok(())
}

/// The port of `diesel-outbox admin` if no address is configured.
const DEFAULT_PORT: u16 = 8687;

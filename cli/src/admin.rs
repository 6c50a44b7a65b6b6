//! Serves the pages, health and metrics over HTTP: for people on call, probes and Prometheus.

mod metrics;
pub(crate) mod server;

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Arc;

use anyhow::{Context, Result};
use crossbeam_channel::{Sender, bounded};
use diesel_outbox::RelayHandle;
use diesel_outbox::config::Config;
use diesel_outbox::program;
use diesel_outbox_pages::{MetricsPage, Pages, Readiness, Visitor};
use metrics_exporter_prometheus::PrometheusHandle;

use self::server::{Later, Reply, Request, Server};
use crate::threads::spawn;

/// The largest body of a request: a form with a list of messages.
const MOST_FORM_BYTES: usize = 256 * 1024;

/// An address that is bound but not served yet.
pub struct Bound {
    listener: TcpListener,
    config: Config,
    recorder: PrometheusHandle,
}

/// The served page. Dropping it stops the server.
pub struct Page {
    server: Server,
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
        let Some(addr) = program::admin(config).addr else {
            return Ok(None);
        };
        let listener = TcpListener::bind(addr)
            .with_context(|| format!("OUTBOX_ADMIN_ADDR: cannot listen on {addr}"))?;
        Ok(Some(Self {
            listener,
            config: config.clone(),
            recorder: metrics::install()?,
        }))
    }

    /// Serves health and metrics, and no pages, until the result is dropped. `measured`: the part of the metrics to show.
    /// `ready`: whether the process can work.
    ///
    /// # Errors
    ///
    /// A thread cannot be started.
    pub(crate) fn serve_metrics(
        self,
        measured: impl Fn(&str) -> String + Send + Sync + 'static,
        ready: impl Fn() -> Readiness + Send + Sync + 'static,
    ) -> Result<Page> {
        let recorder = self.recorder.clone();
        let render = move || measured(&metrics::render(&recorder));
        let page = MetricsPage::new(&self.config, render, ready)?;
        let respond = move |request, peer| page.respond(request, Visitor::unknown(peer)).into();
        self.serve_by("health and metrics are", respond)
    }

    /// Serves the page until the result is dropped. `relay`: the relay of this process, if it has one.
    ///
    /// # Errors
    ///
    /// A thread cannot be started, or no database is configured.
    pub fn serve(self, relay: Option<Arc<RelayHandle>>) -> Result<Page> {
        let recorder = self.recorder.clone();
        let pages = Pages::operators(&self.config, self.config.database_url()?, relay)?;
        let pages = pages.metrics(move || metrics::render(&recorder));
        let pages = Arc::new(pages);
        let respond = move |request, peer| reply(&pages, request, peer);
        self.serve_by("the admin page is", respond)
    }

    fn serve_by(
        self,
        what: &str,
        respond: impl Fn(Request, IpAddr) -> Reply + Send + Sync + 'static,
    ) -> Result<Page> {
        let (stop, stopped) = bounded(0);
        let recorder = self.recorder;
        spawn("admin-metrics", move || {
            metrics::sum_up_until(&recorder, &stopped)
        })?;
        let server = Server::start(self.listener, Arc::new(respond), MOST_FORM_BYTES)?;
        let page = Page {
            server,
            _stop: stop,
        };
        let base = &program::admin(&self.config).base;
        log::info!(event = "admin_started", address:% = page.address(); "{what} at http://{}{base}/", page.address());
        Ok(page)
    }
}

/// Readers of feeds wait without a thread.
fn reply(pages: &Arc<Pages>, request: Request, peer: IpAddr) -> Reply {
    let later = match pages.reply(request, Visitor::unknown(peer)) {
        diesel_outbox_pages::Reply::Now(response) => return response.into(),
        diesel_outbox_pages::Reply::Later(later) => Arc::new(later),
    };
    let (again, waiting) = (Arc::clone(pages), Arc::clone(&later));
    let pages = Arc::clone(pages);
    Reply::Later(Later {
        wait: Box::new(move |wake| pages.wait(&waiting, wake)),
        finish: Box::new(move || again.finish(&later)),
    })
}

/// Options of `admin`.
pub(crate) fn run(settings: &crate::settings::SettingFlags) -> Result<()> {
    let mut config = settings.load()?;
    crate::logging::start(&config)?;
    let signals = crate::signals::channel()?;
    if program::admin(&config).addr.is_none() {
        let local = SocketAddr::from(([127, 0, 0, 1], DEFAULT_PORT));
        config.set("OUTBOX_ADMIN_ADDR", &local.to_string())?;
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

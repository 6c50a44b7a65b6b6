//! Metrics in the text format of Prometheus.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use diesel_outbox::admin::{DepthGauges, Depths};
use diesel_outbox::{Config, RelayHandle};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::http::Response;

/// Upper bounds in seconds: they cover a short claim as well as a message that waits hours for its next attempt.
const BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0, 1800.0, 7200.0, 43200.0,
];

/// How often recorded samples are aggregated.
const SUM_UP_PERIOD: Duration = Duration::from_secs(5);

/// The metrics recorder of this process.
pub(crate) struct Metrics {
    recorder: PrometheusHandle,
    /// Gauges for a process without a relay; a relay sets its own.
    depths: Mutex<DepthGauges>,
}

impl Metrics {
    /// Installs the recorder: metrics of this process are recorded from now on.
    pub(crate) fn install(config: &Config) -> Result<Self> {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), BUCKETS)
            .and_then(PrometheusBuilder::install_recorder)
            .context("cannot install the metrics recorder")?;
        let destinations = config.all_destinations();
        let names = destinations.iter().map(|one| one.name.as_str());
        Ok(Self {
            recorder,
            depths: Mutex::new(DepthGauges::new(&config.table, names)),
        })
    }

    /// Aggregates recorded samples regularly. Otherwise the recorder would keep every sample until the next scrape.
    pub(crate) fn sum_up_until(&self, stopped: &Receiver<()>) {
        while stopped.recv_timeout(SUM_UP_PERIOD) == Err(RecvTimeoutError::Timeout) {
            self.recorder.run_upkeep();
        }
    }

    pub(crate) fn of_relay(&self, relay: &RelayHandle) -> Response {
        relay.record_metrics();
        Response::metrics(self.recorder.render())
    }

    /// The metrics without a relay: only the message counts.
    pub(crate) fn of_depths(&self, depths: &Depths) -> Response {
        let mut gauges = self.depths.lock().unwrap_or_else(PoisonError::into_inner);
        gauges.show(depths);
        Response::metrics(self.recorder.render())
    }
}

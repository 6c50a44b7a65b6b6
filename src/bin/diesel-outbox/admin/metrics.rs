//! Metrics as Prometheus' text.

use anyhow::{Context, Result};
use diesel_outbox::RelayHandle;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::http::Response;

/// Upper bounds in seconds: from a claim to a message that waits for its next attempt.
const BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0, 1800.0, 7200.0, 43200.0,
];

/// The recorder of this process.
pub(crate) struct Metrics(PrometheusHandle);

impl Metrics {
    /// From now on everything in this process is counted.
    pub(crate) fn install() -> Result<Self> {
        PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), BUCKETS)
            .and_then(PrometheusBuilder::install_recorder)
            .map(Self)
            .context("cannot count")
    }

    /// Sums up what was measured; else it is kept one by one until somebody reads it.
    pub(crate) fn sum_up(&self) {
        self.0.run_upkeep();
    }

    pub(crate) fn text(&self, relay: Option<&RelayHandle>) -> Response {
        if let Some(relay) = relay {
            relay.record_metrics();
        }
        Response::metrics(self.0.render())
    }
}

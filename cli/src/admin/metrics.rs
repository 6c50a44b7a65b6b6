//! Metrics in the text format of Prometheus.

use std::time::Duration;

use anyhow::{Context, Result};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use diesel_outbox::program;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::logging;

/// Upper bounds in seconds: they cover a short claim as well as a message that waits hours for its next attempt.
const BUCKETS: &[f64] = &[
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
    60.0, 300.0, 1800.0, 7200.0, 43200.0,
];

/// How often recorded samples are aggregated.
const SUM_UP_PERIOD: Duration = Duration::from_secs(5);

/// Installs the recorder: metrics of this process are recorded from now on.
pub(super) fn install() -> Result<PrometheusHandle> {
    PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), BUCKETS)
        .and_then(PrometheusBuilder::install_recorder)
        .context("cannot install the metrics recorder")
}

/// The text of all metrics.
pub(super) fn render(recorder: &PrometheusHandle) -> String {
    program::record_dropped_lines(logging::dropped_lines());
    recorder.render()
}

/// Aggregates recorded samples regularly. Otherwise the recorder would keep every sample until the next scrape.
pub(super) fn sum_up_until(recorder: &PrometheusHandle, stopped: &Receiver<()>) {
    while stopped.recv_timeout(SUM_UP_PERIOD) == Err(RecvTimeoutError::Timeout) {
        recorder.run_upkeep();
    }
}

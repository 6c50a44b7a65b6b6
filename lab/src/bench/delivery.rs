//! Delivers waiting messages with a relay in this process, and measures the delivery.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use diesel_outbox::config::Config;
use diesel_outbox::program;
use diesel_outbox::{Relay, RelayBuilder, Stats};
use hdrhistogram::Histogram;

use super::ground::Ground;
use super::measures::{cpu_seconds, threads};
use diesel_outbox_cli::output;

/// The interval between two readings of the relay's counts. A claim takes about as long.
const TICK: Duration = Duration::from_millis(5);
/// The longest time without a delivery, if sends fail.
const PATIENCE_WITH_FAILURES: Duration = Duration::from_secs(5);
/// The longest time without a delivery, if no send fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest claim that the histogram resolves.
const MOST_MICROS: u64 = 3_600_000_000;

/// The measurements of a delivery.
pub(super) struct Delivery {
    pub(super) messages: u64,
    pub(super) seconds: f64,
    /// CPU seconds of this process.
    pub(super) cpu: f64,
    /// Threads of this process at the end.
    pub(super) threads: f64,
    /// Counts of the relay since its start.
    pub(super) stats: Stats,
    /// Claims of the measured messages.
    claims: Claims,
}

impl Delivery {
    /// Messages per second.
    pub(super) fn rate(&self) -> f64 {
        self.messages as f64 / self.seconds
    }

    pub(super) fn cpu_us_per_message(&self) -> f64 {
        self.cpu * 1e6 / self.messages as f64
    }

    /// The mean time of a claim.
    pub(super) fn claim_ms(&self) -> f64 {
        self.claims.micros.mean() / 1000.0
    }

    /// The 99th percentile of claim times.
    pub(super) fn claim_p99_ms(&self) -> f64 {
        self.claims.micros.value_at_quantile(0.99) as f64 / 1000.0
    }

    pub(super) fn claim_max_ms(&self) -> f64 {
        self.claims.micros.max() as f64 / 1000.0
    }
}

/// Delivers `messages` messages with the settings of the ground.
pub(super) fn deliver(ground: &Ground, messages: u64) -> Result<Delivery> {
    deliver_with(ground, Relay::from_config(ground.config.clone()), messages)
}

/// Delivers `messages` messages with this relay. Nothing wakes the relay: it finds messages on its own.
pub(super) fn deliver_with(
    ground: &Ground,
    relay: RelayBuilder,
    messages: u64,
) -> Result<Delivery> {
    deliver_behind(ground, relay, 0, messages)
}

/// Delivers `before` messages, then `messages` more, which are measured.
pub(super) fn deliver_behind(
    ground: &Ground,
    relay: RelayBuilder,
    before: u64,
    messages: u64,
) -> Result<Delivery> {
    let all = before + messages;
    let progress = ground.progress("delivering", all);
    let mut claims = Claims::new(Stats::default())?;
    let mut patience = Patience::new();
    let mut cpu_before = cpu_seconds()?;
    let mut began = Instant::now();
    let mut delivered_before = 0;
    let relay = relay.start()?;
    loop {
        let stats = relay.stats();
        if delivered_before < before && stats.delivered >= before {
            delivered_before = stats.delivered;
            (claims, cpu_before, began) = (Claims::new(stats)?, cpu_seconds()?, Instant::now());
        }
        claims.look(stats);
        progress.set_position(stats.delivered);
        if stats.delivered >= all {
            break;
        }
        let failed = stats.retried + stats.dead;
        patience.look(stats.delivered, failed, all, &ground.config)?;
        ground.wait(TICK)?;
    }
    let seconds = began.elapsed().as_secs_f64();
    let cpu = cpu_seconds()? - cpu_before;
    let threads = threads()?;
    let messages = all - delivered_before;
    ensure!(messages > 0, "too few messages to measure");
    progress.finish_and_clear();
    relay.shutdown(ground.config.shutdown_timeout)?;
    let delivery = Delivery {
        messages,
        seconds,
        cpu,
        threads,
        stats: relay.stats(),
        claims,
    };
    ground.say(format_args!(
        "{} delivered/s",
        output::grouped(delivery.rate())
    ));
    Ok(delivery)
}

/// Messages per second of several deliveries.
pub(super) fn rate_of(deliveries: &[Delivery]) -> f64 {
    let messages: u64 = deliveries.iter().map(|one| one.messages).sum();
    let seconds: f64 = deliveries.iter().map(|one| one.seconds).sum();
    messages as f64 / seconds
}

/// The mean of a measure over several deliveries.
pub(super) fn mean_of(deliveries: &[Delivery], measure: fn(&Delivery) -> f64) -> f64 {
    deliveries.iter().map(measure).sum::<f64>() / deliveries.len() as f64
}

/// Fails when nothing is delivered any more.
pub(super) struct Patience {
    delivered: u64,
    since: Instant,
}

impl Patience {
    pub(super) fn new() -> Self {
        Self {
            delivered: 0,
            since: Instant::now(),
        }
    }

    pub(super) fn look(
        &mut self,
        delivered: u64,
        failed: u64,
        messages: u64,
        config: &Config,
    ) -> Result<()> {
        if delivered > self.delivered {
            self.delivered = delivered;
            self.since = Instant::now();
        }
        let limit = match failed {
            0 => PATIENCE,
            _ => PATIENCE_WITH_FAILURES,
        };
        ensure!(
            self.since.elapsed() < limit,
            "{delivered} of {messages} messages were delivered, none in the last {} s, and {failed} sends failed: does the receiver respond with 2xx? ({})",
            limit.as_secs(),
            program::summary(config),
        );
        Ok(())
    }
}

/// Times of single claims. Two readings have few claims between them, so the mean stands for each.
struct Claims {
    before: Stats,
    micros: Histogram<u64>,
}

impl Claims {
    fn new(before: Stats) -> Result<Self> {
        Ok(Self {
            before,
            micros: Histogram::new_with_bounds(1, MOST_MICROS, 3)?,
        })
    }

    fn look(&mut self, stats: Stats) {
        let (now, before) = (
            program::statements(&stats),
            program::statements(&self.before),
        );
        let claims = now.claims - before.claims;
        let micros = now.claim_micros - before.claim_micros;
        if let Some(mean) = micros.checked_div(claims) {
            self.micros.saturating_record_n(mean, claims);
        }
        self.before = stats;
    }
}

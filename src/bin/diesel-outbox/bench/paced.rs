//! Commits at a steady rate: how long a message takes from its commit to the receiver's answer.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use diesel::{Connection, PgConnection};
use diesel_outbox::{
    Config, Dispatcher, HttpDispatcher, Message, NewMessage, Outbox, Outcome, Relay,
};
use hdrhistogram::Histogram;
use serde_json::{Value, json};

use super::{Options, payload};

/// Remembers when each message was committed and how long it took until it was answered.
struct Timed {
    http: HttpDispatcher,
    times: Arc<Times>,
}

struct Times {
    committed: Mutex<HashMap<uuid::Uuid, Instant>>,
    latencies: Mutex<Histogram<u64>>,
}

impl Dispatcher for Timed {
    fn dispatch(&self, message: &Message) -> Outcome {
        let outcome = self.http.dispatch(message);
        let now = Instant::now();
        let committed = self
            .times
            .committed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&message.message_id);
        if let Some(committed) = committed {
            let micros = u64::try_from((now - committed).as_micros()).unwrap_or(u64::MAX);
            let mut latencies = self
                .times
                .latencies
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            latencies.saturating_record(micros);
        }
        outcome
    }
}

/// Commits at a steady rate on an idle outbox; from the commit to the receiver's answer.
pub(super) fn paced(options: &Options, config: &Config, conn: &mut PgConnection) -> Result<Value> {
    let count = options.rate * options.paced_seconds;
    if count == 0 {
        return Ok(Value::Null);
    }
    let times = Arc::new(Times {
        committed: Mutex::default(),
        // A microsecond to an hour.
        latencies: Mutex::new(Histogram::new_with_bounds(1, 3_600_000_000, 3)?),
    });
    let dispatcher = Timed {
        http: HttpDispatcher::new(config)?,
        times: Arc::clone(&times),
    };
    let relay = Relay::from_config(config.clone())
        .dispatcher(dispatcher)
        .start()?;
    let outbox = Outbox::new(&config.table.to_string())?;
    let payload = payload(options.payload_bytes);
    let began = Instant::now();
    for n in 0..count {
        let due = began + Duration::from_secs(1) * n / options.rate;
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let message = NewMessage::new("bench.message", &payload)?;
        let id = message.message_id();
        let mut committed = None;
        conn.transaction::<_, anyhow::Error, _>(|conn| {
            outbox.enqueue(conn, message)?;
            // Just before the commit: a relay may be faster than our next line after it.
            committed = Some(Instant::now());
            times
                .committed
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extend(committed.map(|at| (id, at)));
            Ok(())
        })?;
    }
    ensure!(
        relay.wait_until_idle(Duration::from_secs(60)),
        "the paced run did not end"
    );
    relay.shutdown(config.shutdown_timeout)?;
    let latencies = times
        .latencies
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let millis = |quantile: f64| latencies.value_at_quantile(quantile) as f64 / 1000.0;
    Ok(json!({
        "per_second": options.rate,
        "messages": latencies.len(),
        "p50_ms": millis(0.5),
        "p90_ms": millis(0.9),
        "p99_ms": millis(0.99),
        "max_ms": latencies.max() as f64 / 1000.0,
    }))
}

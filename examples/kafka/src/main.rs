//! A relay that writes messages to a topic of Kafka instead of sending them over HTTP.
//!
//! ```sh
//! scripts/install-package librdkafka
//! KAFKA_BROKERS=127.0.0.1:9092 scripts/with-postgres cargo run --manifest-path examples/kafka/Cargo.toml
//! ```
//!
//! All messages go to the topic `outbox`. The ordering key is the key of the record, so the messages of a key are in one
//! partition, in their order. A message may come twice, with the same header `id`: consumers remember the ids that they
//! have handled.

mod producer;

use std::error::Error;
use std::time::Duration;

use diesel::Connection;
use diesel::PgConnection;
use diesel_outbox::{Relay, config};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::producer::Kafka;

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    // Install the handlers before the first thread starts, so that no signal kills the process.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let brokers = std::env::var("KAFKA_BROKERS")?;
    // DATABASE_URL, and settings such as OUTBOX_CONCURRENCY.
    let config = config::from_env()?;
    let mut conn = PgConnection::establish(&std::env::var("DATABASE_URL")?)?;
    diesel_outbox::migrate(&mut conn, &config.table)?;
    drop(conn);
    let relay = Relay::from_config(config)
        .dispatcher(Kafka::new(&brokers, "outbox")?)
        .start()?;
    println!("the relay is running");
    signals.forever().next();
    relay.shutdown(Duration::from_secs(30))?;
    Ok(())
}

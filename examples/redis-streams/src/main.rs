//! A relay that writes messages to a stream of Redis instead of sending them over HTTP.
//!
//! ```sh
//! redis-server --appendonly yes --appendfsync always &
//! REDIS_URL=redis://127.0.0.1/ scripts/with-postgres cargo run --manifest-path examples/redis-streams/Cargo.toml
//! ```
//!
//! All messages are in one stream, `outbox`, so the order within ordering keys is the order of the stream. A message may
//! come twice, with the same field `id`: consumers remember the ids that they have handled.

mod streams;

use std::error::Error;
use std::time::Duration;

use diesel::Connection;
use diesel::PgConnection;
use diesel_outbox::{Relay, config};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::streams::Streams;

fn main() -> Result<(), Box<dyn Error>> {
    env_logger::init();
    // Install the handlers before the first thread starts, so that no signal kills the process.
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let redis_url = std::env::var("REDIS_URL")?;
    // DATABASE_URL, and settings such as OUTBOX_CONCURRENCY.
    let config = config::from_env()?;
    let mut conn = PgConnection::establish(&std::env::var("DATABASE_URL")?)?;
    diesel_outbox::migrate(&mut conn, &config.table)?;
    drop(conn);
    let relay = Relay::from_config(config)
        .dispatcher(Streams::new(&redis_url, "outbox")?)
        .start()?;
    println!("the relay is running");
    signals.forever().next();
    relay.shutdown(Duration::from_secs(30))?;
    Ok(())
}

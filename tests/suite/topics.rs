//! Topics as lanes, the waiting messages of one topic and destination: many lanes, and a busy lane next to quiet
//! ones.

use std::time::Duration;

use diesel_outbox::Relay;
use url::Url;

use crate::support::{Database, Receiver, end, eventually};

#[test]
fn more_topics_than_one_claim_takes_are_all_served() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload) SELECT 't' || n % 150, '1' FROM generate_series(1, 450) n",
    );
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .url(&receiver.url())
        .start()
        .expect("a relay");
    assert!(relay.wait_until_idle(Duration::from_secs(30)));
    end(&relay);
    assert_eq!(database.count("delivered"), 450);
    assert_eq!(receiver.count(), 450);
}

#[test]
fn a_relay_with_many_topics_and_nothing_due_is_idle_and_does_not_spin() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         SELECT 't' || n, '1', now() + interval '1 h' FROM generate_series(1, 200) n",
    );
    let mut url = Url::parse(&database.url).expect("DATABASE_URL is a URL");
    let name = database.name();
    url.query_pairs_mut().append_pair("application_name", &name);
    let relay = Relay::builder(url.as_str())
        .outbox(&name)
        .poll_interval(Duration::from_secs(20))
        .url("http://127.0.0.1:9/")
        .start()
        .expect("a relay");
    assert!(relay.wait_until_idle(Duration::from_secs(10)));
    // The claimer waits for the next poll if its connection, whose last statement ended a claim, stays idle.
    let idle_since = format!(
        "SELECT count(*) FROM pg_stat_activity
          WHERE application_name = '{name}' AND state = 'idle' AND query = 'COMMIT'
            AND state_change < clock_timestamp() - interval '300 ms'"
    );
    eventually("the claimer waits", || database.number(&idle_since) == 1);
    end(&relay);
}

#[test]
fn a_quiet_topic_does_not_wait_behind_a_busy_one() {
    let database = Database::new();
    database.execute(
        "INSERT INTO {o} (topic, payload, available_at)
         SELECT 'busy', '1', now() - interval '1 h' FROM generate_series(1, 20000)",
    );
    let receiver = Receiver::ok();
    let relay = database
        .relay()
        .batch(100)
        .url(&receiver.url())
        .start()
        .expect("a relay");
    receiver.wait_for(500);
    database.execute("INSERT INTO {o} (topic, payload) VALUES ('quiet', '1')");
    eventually("the quiet message arrives", || {
        database.number("SELECT count(*) FROM {o}_ledger WHERE topic = 'quiet'") == 1
    });
    let waiting = database.number("SELECT count(*) FROM {o} WHERE topic = 'busy'");
    assert!(waiting > 0, "the busy topic still has messages");
    end(&relay);
}

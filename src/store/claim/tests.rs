//! How large a claim is.

use diesel::connection::SimpleConnection;

use super::*;
use crate::store::lease;
use crate::store::model::database::Outbox;
use crate::store::ordered::{self, Candidate, Key};

/// Characters of a payload: a thousandth of that when it is stored.
const LARGE: usize = 100_000;

/// Six messages of a lane, of which the first is small and the others are large.
fn enqueue(conn: &mut PgConnection, name: &OutboxName, key: &str) {
    conn.batch_execute(&format!(
        "INSERT INTO {} (topic, payload, headers, ordering_key)
         SELECT 'topic', CASE n WHEN 1 THEN '1' ELSE to_json(repeat('x', {LARGE})) END,
                json_build_object('x-n', n), {key}
           FROM generate_series(1, 6) AS n ORDER BY n",
        name.outbox()
    ))
    .expect("enqueued");
}

fn sequences(conn: &mut PgConnection, name: &OutboxName) -> Vec<i64> {
    let live = crate::store::look::live(conn, name).expect("rows");
    live.iter().map(|message| message.sequence.0).collect()
}

/// R48
#[test]
fn a_claim_ends_with_the_message_that_makes_it_as_large_as_it_may_be() {
    type Claims = fn(&mut PgConnection, &OutboxName, Claimant<'_>) -> QueryResult<Batch>;
    let of_a_lane: Claims = |conn, name, claimant| {
        let lane = Lane {
            stream: Stream {
                topic: Topic {
                    topic: "topic".to_owned(),
                    destination: String::new(),
                },
                is_keyed: false,
            },
            room: 6,
            after: Position::START,
        };
        claim(conn, name, claimant, &[lane], 6)
    };
    let chosen: Claims = |conn, name, claimant| {
        let sequences = sequences(conn, name);
        claim_chosen(conn, name, claimant, &sequences)
    };
    let keyed: Claims = |conn, name, claimant| {
        let candidate = |sequence| Candidate {
            sequence,
            goes_to: String::new(),
        };
        let candidates: Vec<Candidate> = sequences(conn, name).into_iter().map(candidate).collect();
        ordered::claim(conn, name, claimant, &candidates).map(|batch| batch.expect("no other"))
    };
    let next: Claims = |conn, name, claimant| {
        let keys: Vec<Key> = crate::store::look::live(conn, name)?
            .iter()
            .filter_map(Key::of)
            .collect();
        ordered::claim_next(conn, name, claimant, &keys, &[])
    };
    let each = "'key-' || n";
    for (claims, key) in [
        (of_a_lane, "NULL"),
        (chosen, "NULL"),
        (keyed, each),
        (next, each),
    ] {
        let outbox = Outbox::new();
        let name = &outbox.name;
        let mut conn = outbox.connect();
        enqueue(&mut conn, name, key);
        let minute = Duration::from_secs(60);
        let lease = lease::register(&mut conn, name, "test", minute, false, None);
        let lease = lease.expect("a lease");
        let claimant = |bytes| Claimant {
            lease,
            expired: &[],
            max_attempts: 3,
            bytes,
        };
        for (bytes, count, is_cut) in [
            // The small one, and the first that is more than that.
            (LARGE, 2, true),
            // One in any case.
            (1, 1, true),
            (3 * LARGE, 3, false),
        ] {
            let batch = claims(&mut conn, name, claimant(bytes)).expect("a claim");
            assert_eq!(
                (batch.claimed.len(), batch.is_cut),
                (count, is_cut),
                "{key}, {bytes}"
            );
            let headers = |one: &Claimed| one.message.headers.is_some();
            assert!(batch.claimed.iter().all(headers));
        }
        let none = claims(&mut conn, name, claimant(LARGE)).expect("a claim");
        assert!(none.claimed.is_empty() && !none.is_cut);
    }
}

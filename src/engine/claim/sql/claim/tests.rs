//! The size of a claim, and claims at the same time.

use diesel::connection::SimpleConnection;

use super::*;
use crate::engine::keys::sql::ordered::{self, Candidate, Key};
use crate::error::DatabaseError;
use crate::sql::tests::Outbox;

/// Characters of a payload. Compressed, the payload takes a thousandth of that.
const LARGE: usize = 100_000;

/// Enqueues six messages of a lane: the first is small, the others are large.
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
    let live = crate::testing::sql::live(conn, name).expect("rows");
    live.iter().map(|message| message.sequence.0).collect()
}

fn found(sequence: i64, bytes: i32) -> LockedRow {
    LockedRow::new((sequence, bytes, None, None, None))
}

/// R48
#[test]
fn a_claim_ends_with_the_message_that_fills_it() {
    let count = |sizes: &[i32], bytes| {
        let found: Vec<LockedRow> = (1..).zip(sizes).map(|(n, size)| found(n, *size)).collect();
        how_many_fit(&found, bytes)
    };
    assert_eq!(count(&[], 10), 0);
    assert_eq!(count(&[4, 4, 4, 4], 10), 3);
    assert_eq!(count(&[5, 5, 5], 10), 2);
    assert_eq!(count(&[100, 1], 10), 1, "at least one");
    assert_eq!(count(&[0, 0, i32::MAX, 1], 1), 3);
    assert_eq!(count(&[i32::MAX; 4], usize::MAX), 4);
    let with_headers = [LockedRow::new((1, 4, Some(6), None, None)), found(2, 1)];
    assert_eq!(how_many_fit(&with_headers, 10), 1);
}

/// R48
#[test]
fn a_claim_is_one_statement_only_if_it_cannot_be_too_large_and_no_message_is_held() {
    let claimant = |bytes, expired| Claimant {
        expired,
        bytes,
        ..Claimant::of(LeaseId(1))
    };
    let bytes = 16 * 1024 * 1024;
    assert!(claimant(bytes, &[]).has_space_for_any(15));
    assert!(!claimant(bytes, &[]).has_space_for_any(16));
    assert!(!claimant(bytes, &[7]).has_space_for_any(1));
    assert!(claimant(1, &[]).has_space_for_any(1), "at least one");
    assert!(!claimant(1, &[]).has_space_for_any(2));
}

/// G6
#[test]
fn a_message_of_a_dead_relay_is_sent_once_more_and_then_counts_as_failed() {
    let taken_over = |holder, error: Option<&str>| {
        let facts = (1, 1, None, holder, error.map(str::to_owned));
        LockedRow::new(facts).taken_over
    };
    assert_eq!(taken_over(None, None), TakenOver::No);
    assert_eq!(taken_over(None, Some("ABANDONED")), TakenOver::No);
    assert_eq!(taken_over(Some(7), None), TakenOver::Once);
    assert_eq!(taken_over(Some(7), Some("HTTP_500")), TakenOver::Once);
    assert_eq!(taken_over(Some(7), Some("ABANDONED")), TakenOver::Again);
}

fn lane(topic: &str, room: usize) -> Lane {
    Lane {
        stream: Stream {
            topic: Topic::new(topic, ""),
            is_keyed: false,
        },
        room,
        after: Position::START,
    }
}

/// More lanes than one statement reads.
#[test]
fn many_lanes_give_what_they_are_asked_for_and_together_no_more_than_there_is_room() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect_as_relay(), &outbox.name);
    conn.batch_execute(&format!(
        "INSERT INTO {} (topic, payload) SELECT 'topic-' || n % 20, '1' FROM generate_series(1, 200) n",
        name.outbox()
    ))
    .expect("enqueued");
    let lease = outbox.lease(&mut conn);
    let claimant = Claimant::of(lease);
    let lanes: Vec<Lane> = (0..20).map(|n| lane(&format!("topic-{n}"), n)).collect();
    let batch = claim(&mut conn, name, claimant, &lanes, 200).expect("a claim");
    assert!(!batch.is_cut);
    for lane in &lanes {
        let topic = &lane.stream.topic.topic;
        let of_lane = batch
            .claimed
            .iter()
            .filter(|one| one.message.topic == *topic);
        assert_eq!(of_lane.count(), lane.room.min(10), "{topic}");
    }
    let rest: Vec<Lane> = (0..20).map(|n| lane(&format!("topic-{n}"), 10)).collect();
    let batch = claim(&mut conn, name, claimant, &rest, 7).expect("a claim");
    assert!(batch.is_cut, "more messages than room");
    assert_eq!(batch.claimed.len(), 7);
}

/// R48
#[test]
fn a_claim_ends_with_the_message_that_makes_it_as_large_as_it_may_be() {
    type Claims = fn(&mut PgConnection, &OutboxName, Claimant<'_>) -> QueryResult<Batch>;
    let of_a_lane: Claims =
        |conn, name, claimant| claim(conn, name, claimant, &[lane("topic", 6)], 6);
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
        ordered::claim(conn, name, claimant, &candidates).map(|batch| batch.expect("the lock"))
    };
    let next: Claims = |conn, name, claimant| {
        let keys: Vec<Key> = crate::testing::sql::live(conn, name)?
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
        let lease = outbox.lease(&mut conn);
        let claimant = |bytes| Claimant {
            bytes,
            ..Claimant::of(lease)
        };
        for (bytes, count, is_cut) in [
            // The small message, and the first large one.
            (LARGE, 2, true),
            // At least one message.
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

/// R34: a second claim does not wait for the first, and does not get the messages that the first has locked.
#[test]
fn a_claim_skips_what_another_one_has_locked() {
    let outbox = Outbox::new();
    let name = &outbox.name;
    let (conn, other) = (&mut outbox.connect(), &mut outbox.connect());
    enqueue(conn, name, "NULL");
    let lane = |conn: &mut PgConnection, room| {
        let lease = outbox.lease(conn);
        let topic = Topic::new("topic", "");
        let lanes = [Lane {
            stream: Stream {
                topic,
                is_keyed: false,
            },
            room,
            after: Position::START,
        }];
        let claimant = Claimant::of(lease);
        let batch = claim(conn, name, claimant, &lanes, room).expect("a claim");
        let sequences = batch.claimed.into_iter();
        sequences
            .map(|one| one.message.sequence.0)
            .collect::<Vec<i64>>()
    };
    conn.transaction::<_, diesel::result::Error, _>(|conn| {
        assert_eq!(lane(conn, 2), [1, 2]);
        assert_eq!(lane(other, 10), [3, 4, 5, 6]);
        Ok(())
    })
    .expect("committed");
}

/// G1: the claim is committed before it is known which of its messages were delivered before.
#[test]
fn a_claim_that_cannot_find_out_what_was_delivered_counts_as_one_without_an_answer() {
    let outbox = Outbox::new();
    let name = &outbox.name;
    let (conn, other) = (&mut outbox.connect(), &mut outbox.connect());
    let lease = outbox.lease(conn);
    conn.batch_execute(&format!(
        "SET lock_timeout = '100ms';
         INSERT INTO {} (topic, payload, idempotency_key) VALUES ('topic', '1', 'key')",
        name.outbox()
    ))
    .expect("enqueued");
    other
        .transaction::<_, Error, _>(|other| {
            other.batch_execute(&format!("LOCK TABLE {}", name.ledger()))?;
            let claimant = Claimant::of(lease);
            let lanes = [lane("topic", 1)];
            let claim = claim(conn, name, claimant, &lanes, 1);
            let error = claim.expect_err("the ledger is locked");
            assert!(DatabaseError::from(error).is_without_answer());
            Ok(())
        })
        .expect("unlocked");
    let held = outbox::table(name.outbox()).filter(outbox::locked_by.eq(lease.0));
    assert_eq!(held.count().get_result(conn), Ok(1));
}

/// An UPDATE may have written any number: one message must not end the claim of all.
#[test]
fn attempts_that_are_out_of_range_hold_up_no_takeover() {
    let outbox = Outbox::new();
    let name = &outbox.name;
    let conn = &mut outbox.connect();
    let (lease, gone) = (outbox.lease(conn), 7777);
    conn.batch_execute(&format!(
        "INSERT INTO {0} (topic, payload) VALUES ('topic', '1');
         UPDATE {0} SET attempts = 2147483647, locked_by = {gone}, locked_at = now()",
        name.outbox()
    ))
    .expect("enqueued");
    let claimant = Claimant {
        expired: &[gone],
        ..Claimant::of(lease)
    };
    claim(conn, name, claimant, &[lane("topic", 1)], 1).expect("claimed");
    let held = outbox::table(name.outbox()).filter(outbox::locked_by.eq(lease.0));
    let attempts = held.select(outbox::attempts).get_result::<i32>(conn);
    assert_eq!(attempts, Ok(1_000_000_001));
}

/// R34: statements use Diesel's query builder where it can express them. A file with SQL text says why, and is in a folder
/// named `sql`.
#[test]
fn each_file_with_sql_as_text_says_why_and_is_in_a_folder_for_it() {
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders = vec![source.clone()];
    let mut count = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.ends_with("tests.rs") || path.ends_with("simulation") {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("text");
            let text = text
                .split(
                    "#[cfg(test)]
mod tests {",
                )
                .next()
                .unwrap_or_default();
            let (comments, code): (Vec<_>, Vec<_>) = text
                .lines()
                .partition(|line| line.trim_start().starts_with("//"));
            let calls = ["sql_query(", " statement(", "unprepared_statement("];
            if code
                .iter()
                .any(|line| calls.iter().any(|call| line.contains(call)))
            {
                count += 1;
                let says_why = comments
                    .iter()
                    .any(|line| line.contains("Text: ") || line.contains("Text, "));
                let module = path
                    .strip_prefix(&source)
                    .expect("a part")
                    .with_extension("");
                assert!(
                    module.iter().any(|part| part == "sql")
                        && (says_why || path.ends_with("statement.rs")),
                    "{}",
                    path.display()
                );
            }
        }
    }
    assert!(count > 10, "{count}");
}

//! Fan-outs of many messages to many destinations, in pieces.

use diesel::connection::SimpleConnection;
use diesel::pg::data_types::PgTimestamp;

use super::*;
use crate::sql::tests::Outbox;

impl From<Vec<String>> for Parts {
    fn from(to: Vec<String>) -> Self {
        let registrations = vec![None; to.len()];
        Self { to, registrations }
    }
}

/// The parts of a fan-out: how often each destination has one.
type Counts = Vec<(String, i64)>;

fn destinations(count: usize) -> Parts {
    let names = (0..count).map(|n| format!("receiver-{n:05}"));
    names.collect::<Vec<String>>().into()
}

fn enqueue(conn: &mut PgConnection, name: &OutboxName, count: usize, payload: &str, key: &str) {
    conn.batch_execute(&format!(
        "INSERT INTO {} (topic, payload, idempotency_key)
         SELECT 'a', to_json({payload}), {key} FROM generate_series(1, {count}) AS n",
        name.outbox()
    ))
    .expect("messages");
}

/// Claims the messages that name no destination.
fn claim_all(conn: &mut PgConnection, name: &OutboxName, lease: i64) -> Vec<Claim> {
    let claims: Vec<(i64, PgTimestamp)> = statement(format!(
        "UPDATE {} SET locked_by = {lease}, locked_at = clock_timestamp() WHERE destination = ''
         RETURNING sequence, locked_at",
        name.outbox()
    ))
    .giving::<(BigInt, Timestamptz)>()
    .load(conn)
    .expect("claims");
    let claims = claims.into_iter();
    claims
        .map(|(sequence, at)| Claim { sequence, at: at.0 })
        .collect()
}

fn parts(conn: &mut PgConnection, name: &OutboxName) -> Counts {
    statement(format!(
        "SELECT destination, count(*) FROM {} WHERE destination <> '' GROUP BY 1 ORDER BY 1",
        name.outbox()
    ))
    .giving::<(Text, BigInt)>()
    .load(conn)
    .expect("rows")
}

fn rows(conn: &mut PgConnection, name: &OutboxName) -> i64 {
    statement(format!("SELECT count(*) FROM {}", name.outbox()))
        .giving::<BigInt>()
        .get_result(conn)
        .expect("a count")
}

/// Splits until nothing is left. Returns the number of calls.
fn split_all(
    conn: &mut PgConnection,
    name: &OutboxName,
    claims: &[Claim],
    destinations: &Parts,
    piece: Piece,
) -> usize {
    let messages: Vec<Split<'_>> = claims.iter().map(|claim| (*claim, destinations)).collect();
    let mut left = messages;
    let mut calls = 0;
    while !left.is_empty() {
        let before = rows(conn, name);
        let done = split(conn, name, LeaseId(1), &left, piece).expect("a piece");
        assert!(done.in_conflict.is_empty());
        let new = rows(conn, name) - before + i64::try_from(done.changed.len()).expect("a count");
        assert!((1..=piece.parts).contains(&usize::try_from(new).expect("new rows")));
        left.retain(|(claim, _)| !done.changed.contains(&claim.sequence));
        assert_eq!(left.len(), done.unfinished.len());
        calls += 1;
    }
    calls
}

/// R23, R46: once, each row was compared with each, in a plan for one row: 6,400 parts took 6 s, and 20,000 a minute.
/// The table was never analysed.
#[test]
fn twenty_thousand_parts_are_placed_in_seconds() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect_as_relay(), &outbox.name);
    for key in ["NULL", "'key-' || n"] {
        enqueue(&mut conn, name, 40, "repeat('x', 1000)", key);
        let claims = claim_all(&mut conn, name, 1);
        let destinations = destinations(500);
        let began = std::time::Instant::now();
        // One call: even so the work must not grow with the square of the parts.
        let all: Vec<Split<'_>> = claims.iter().map(|one| (*one, &destinations)).collect();
        let done = split(&mut conn, name, LeaseId(1), &all, Piece::WHOLE).expect("a split");
        eprintln!("20,000 parts with the key {key}: {:?}", began.elapsed());
        assert_eq!(done.changed.len(), 40);
        assert!(began.elapsed() < std::time::Duration::from_secs(15));
        assert_eq!(rows(&mut conn, name), 20_000);
        conn.batch_execute(&format!("TRUNCATE {}", name.outbox()))
            .expect("empty");
    }
}

/// R23: a transaction has a bounded number of parts, and each destination gets its part once.
#[test]
fn a_piece_has_at_most_its_parts() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect_as_relay(), &outbox.name);
    for key in ["NULL", "'key-' || n"] {
        enqueue(&mut conn, name, 3, "n", key);
        let claims = claim_all(&mut conn, name, 1);
        let piece = Piece {
            parts: 7,
            bytes: usize::MAX,
        };
        assert_eq!(
            split_all(&mut conn, name, &claims, &destinations(10), piece),
            5
        );
        let expected: Counts = destinations(10)
            .to
            .into_iter()
            .map(|one| (one, 3))
            .collect();
        assert_eq!(parts(&mut conn, name), expected);
        conn.batch_execute(&format!("TRUNCATE {}", name.outbox()))
            .expect("empty");
    }
}

/// R23: once, a message of 1 MB for 2,000 destinations was one transaction, which never ended in time.
#[test]
fn a_piece_has_at_most_its_bytes() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect_as_relay(), &outbox.name);
    // Random text, which does not shrink to a few bytes.
    let text = "(SELECT string_agg(md5(random()::text), '') FROM generate_series(1, 6000))";
    enqueue(&mut conn, name, 1, text, "NULL");
    let claims = claim_all(&mut conn, name, 1);
    let piece = Piece {
        parts: 500,
        bytes: 1 << 20,
    };
    let calls = split_all(&mut conn, name, &claims, &destinations(50), piece);
    // 190 KB each: five in a piece; compressed, one or two more.
    assert!((6..=10).contains(&calls), "{calls}");
    assert_eq!(parts(&mut conn, name).len(), 50);
    // A part that is larger than a piece is placed all the same.
    enqueue(&mut conn, name, 1, text, "NULL");
    let claims = claim_all(&mut conn, name, 1);
    let piece = Piece {
        parts: 500,
        bytes: 1,
    };
    assert_eq!(
        split_all(&mut conn, name, &claims, &destinations(3), piece),
        3
    );
}

/// The settler decides whose turn it is: an older message has a smaller sequence.
#[test]
fn a_piece_goes_to_the_message_that_comes_first_in_the_list() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect_as_relay(), &outbox.name);
    enqueue(&mut conn, name, 2, "1", "NULL");
    let mut claims = claim_all(&mut conn, name, 1);
    claims.sort_by_key(|one| one.sequence);
    let (older, newer) = (claims[0], claims[1]);
    let (many, one) = (destinations(10), destinations(1));
    let piece = Piece {
        parts: 3,
        bytes: usize::MAX,
    };
    let messages = [(newer, &one), (older, &many)];
    let done = split(&mut conn, name, LeaseId(1), &messages, piece).expect("a piece");
    assert_eq!(done.changed, [newer.sequence]);
    let placed = Some(many.to[1].clone());
    assert_eq!(done.unfinished, [(older.sequence, placed)]);
}

/// G2, G3: whoever continues a fan-out knows how far it is, also with another list of destinations.
#[test]
fn another_relay_continues_where_a_fan_out_has_ended() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect_as_relay(), &outbox.name);
    enqueue(&mut conn, name, 1, "1", "NULL");
    let before = claim_all(&mut conn, name, 1);
    let (all, piece) = (
        destinations(6),
        Piece {
            parts: 3,
            bytes: usize::MAX,
        },
    );
    let done = split(&mut conn, name, LeaseId(1), &[(before[0], &all)], piece).expect("a piece");
    assert_eq!(
        done.unfinished,
        [(before[0].sequence, Some(all.to[2].clone()))]
    );
    // The first relay is gone. The second has lost one destination that has its part, and one that has none, and knows
    // a new one.
    let now = claim_all(&mut conn, name, 2);
    let others = [
        "receiver-00001",
        "receiver-00002",
        "receiver-00004",
        "receiver-00005",
        "receiver-00009",
    ];
    let others = Parts::from(others.map(str::to_owned).to_vec());
    let done = split(&mut conn, name, LeaseId(1), &[(before[0], &all)], piece).expect("a piece");
    assert!(
        done.changed.is_empty() && done.unfinished.is_empty(),
        "{done:?}"
    );
    let done = split(&mut conn, name, LeaseId(2), &[(now[0], &others)], piece).expect("a piece");
    assert_eq!(done.changed, [now[0].sequence]);
    let once = |n: usize| (format!("receiver-0000{n}"), 1);
    assert_eq!(parts(&mut conn, name), [0, 1, 2, 4, 5, 9].map(once));
}

/// G3: a fan-out whose last destinations are gone ends without another part.
#[test]
fn a_fan_out_without_further_destinations_ends() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect_as_relay(), &outbox.name);
    enqueue(&mut conn, name, 1, "1", "NULL");
    let claims = claim_all(&mut conn, name, 1);
    let (all, piece) = (
        destinations(3),
        Piece {
            parts: 2,
            bytes: usize::MAX,
        },
    );
    split(&mut conn, name, LeaseId(1), &[(claims[0], &all)], piece).expect("a piece");
    let done = split(
        &mut conn,
        name,
        LeaseId(1),
        &[(claims[0], &Parts::default())],
        piece,
    )
    .expect("a piece");
    assert_eq!(done.changed, [claims[0].sequence]);
    assert_eq!(rows(&mut conn, name), 2);
}

/// R25: another message with the key of a part that is not placed yet.
#[test]
fn a_conflict_in_a_later_piece_is_found() {
    let outbox = Outbox::new();
    let (mut conn, name) = (outbox.connect_as_relay(), &outbox.name);
    let (all, piece) = (
        destinations(4),
        Piece {
            parts: 2,
            bytes: usize::MAX,
        },
    );
    for (payload, is_same) in [("1", true), ("2", false)] {
        enqueue(&mut conn, name, 1, "1", "'key'");
        let claims = claim_all(&mut conn, name, 1);
        let message = [(claims[0], &all)];
        let done = split(&mut conn, name, LeaseId(1), &message, piece).expect("a piece");
        assert_eq!(done.unfinished.len(), 1);
        conn.batch_execute(&format!(
            "INSERT INTO {} (topic, destination, payload, idempotency_key) VALUES ('a', '{}', '{payload}', 'key')",
            name.outbox(),
            all.to[3]
        ))
        .expect("a message");
        let done = split(&mut conn, name, LeaseId(1), &message, piece).expect("a piece");
        assert_eq!(
            (done.changed.len(), done.in_conflict.len()),
            if is_same { (1, 0) } else { (0, 1) }
        );
        assert_eq!(parts(&mut conn, name).len(), if is_same { 4 } else { 3 });
        conn.batch_execute(&format!("TRUNCATE {}", name.outbox()))
            .expect("empty");
    }
}

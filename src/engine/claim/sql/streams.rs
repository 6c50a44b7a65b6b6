//! The streams that have live messages. A stream is the messages of one topic and destination, either with or without
//! an ordering key.
//!
//! Text: a loose index scan is recursive (WITH RECURSIVE).

use diesel::PgConnection;
use diesel::deserialize;
use diesel::pg::Pg;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{BoolExpressionMethods, ExpressionMethods, QueryDsl, Queryable, RunQueryDsl};
use diesel::result::QueryResult;
use diesel::sql_types::{Array, BigInt, Bool, Text, Timestamptz};

use super::claim::{Position, Stream, Topic};
use crate::name::OutboxName;
use crate::sql::functions::On;
use crate::sql::statement::{statement, unprepared, unprepared_statement};
use crate::sql::table::candidate;

/// A stream, and the position of its first live message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FoundStream {
    pub(crate) stream: Stream,
    pub(crate) first: Position,
}

/// Topic, destination and position, and whether the messages have a key.
type FoundSql = ((Text, Text, Timestamptz, BigInt), Bool);

impl Queryable<FoundSql, Pg> for FoundStream {
    type Row = ((String, String, PgTimestamp, i64), bool);

    fn build(row: Self::Row) -> deserialize::Result<Self> {
        let ((topic, destination, available_at, sequence), is_keyed) = row;
        let topic = Topic { topic, destination };
        Ok(Self {
            stream: Stream { topic, is_keyed },
            first: Position::new(available_at, sequence),
        })
    }
}

/// All streams, by loose index scans: one probe for each stream.
pub(crate) fn streams(conn: &mut PgConnection, name: &OutboxName) -> QueryResult<Vec<FoundStream>> {
    statement(format!(
        "{} SELECT *, false FROM plain UNION ALL SELECT *, true FROM keyed",
        both_scans(name, &NEXT),
    ))
    .giving::<FoundSql>()
    .load(conn)
}

/// The streams of the messages after a sequence, so that new messages need not wait for the slow query for all
/// streams.
pub(crate) fn streams_behind(
    conn: &mut PgConnection,
    name: &OutboxName,
    behind: i64,
) -> QueryResult<Vec<FoundStream>> {
    let mut found = Vec::new();
    let place = (
        candidate::topic,
        candidate::destination,
        candidate::available_at,
        candidate::sequence,
    );
    for is_keyed in [false, true] {
        let newest = candidate::table(name.outbox())
            .filter(candidate::sequence.gt(behind))
            .filter(candidate::ordering_key.is_not_null().eq(is_keyed))
            .distinct_on((candidate::topic, candidate::destination))
            .order(place)
            .select((place, candidate::ordering_key.is_not_null()));
        // A plan for all sequences would use the claim index.
        found.extend(unprepared(newest).load::<FoundStream>(conn)?);
    }
    Ok(found)
}

/// The streams that may have messages for this named destination: one probe for each topic, however many destinations
/// there are.
pub(crate) fn streams_to(
    conn: &mut PgConnection,
    name: &OutboxName,
    destination: &str,
) -> QueryResult<Vec<Stream>> {
    let topics = unprepared_statement(format!(
        "{} SELECT topic, false FROM plain UNION ALL SELECT topic, true FROM keyed",
        both_scans(name, &["topic"]),
    ));
    let found: Vec<(String, bool)> = topics.giving::<(Text, Bool)>().load(conn)?;
    let stream = |(topic, is_keyed): (String, bool)| Stream {
        topic: Topic::new(&topic, destination),
        is_keyed,
    };
    Ok(found.into_iter().map(stream).collect())
}

/// The streams that are not in `known`: one probe between each two known streams. The query does not read the dead
/// index entries of known streams, which can be many while an old snapshot keeps them.
pub(crate) fn streams_beside(
    conn: &mut PgConnection,
    name: &OutboxName,
    known: &[Stream],
) -> QueryResult<Vec<FoundStream>> {
    let mut found = Vec::new();
    for is_keyed in [false, true] {
        let of_kind = known.iter().filter(|stream| stream.is_keyed == is_keyed);
        let places = of_kind.map(|Stream { topic, .. }| (&*topic.topic, &*topic.destination));
        // The start: no topic is empty.
        let places = [("", "")].into_iter().chain(places).unzip();
        found.extend(beside(conn, name, is_keyed, places)?);
    }
    Ok(found)
}

/// The streams of one kind that are at none of these places, and after the first place. The database sorts the places,
/// because their bytes may differ in the database's encoding.
fn beside(
    conn: &mut PgConnection,
    name: &OutboxName,
    is_keyed: bool,
    (topics, destinations): (Vec<&str>, Vec<&str>),
) -> QueryResult<Vec<FoundStream>> {
    let which = which(is_keyed);
    let within = |from: &str| {
        format!(
            "(o.topic, o.destination) > ({from}topic, {from}destination)
             AND (o.topic, o.destination) < (gap.to_topic, gap.to_destination)"
        )
    };
    let last = |column: &str| format!("(SELECT {column} FROM gap WHERE to_topic IS NULL)");
    let behind_last = format!(
        "(o.topic, o.destination) > ({}, {})",
        last("from_topic"),
        last("from_destination")
    );
    statement(format!(
        "WITH RECURSIVE gap AS MATERIALIZED (
            SELECT topic AS from_topic, destination AS from_destination,
                   lead(topic) OVER places AS to_topic, lead(destination) OVER places AS to_destination,
                   row_number() OVER places AS n
              FROM unnest($1::text[], $2::text[]) AS t(topic, destination)
            WINDOW places AS (ORDER BY topic COLLATE \"C\", destination COLLATE \"C\")
         ), inside AS (
            (SELECT gap.n, first.* FROM gap CROSS JOIN LATERAL ({first}) first
              WHERE gap.to_topic IS NOT NULL)
            UNION ALL
            (SELECT gap.n, next.* FROM inside JOIN gap USING (n) CROSS JOIN LATERAL ({next}) next)
         ), {behind}
         SELECT topic, destination, available_at, sequence, $3 FROM inside
         UNION ALL
         SELECT *, $3 FROM behind",
        first = first_of_next(name, which, &within("gap.from_")),
        next = first_of_next(name, which, &within("inside.")),
        behind = scan(name, "behind", which, &behind_last, &NEXT),
    ))
    .bind::<Array<Text>, _>(topics)
    .bind::<Array<Text>, _>(destinations)
    .bind::<Bool, _>(is_keyed)
    .giving::<FoundSql>()
    .load(conn)
}

fn which(is_keyed: bool) -> &'static str {
    match is_keyed {
        false => "o.ordering_key IS NULL",
        true => "o.ordering_key IS NOT NULL",
    }
}

/// The columns that tell one stream from the next.
const NEXT: [&str; 2] = ["topic", "destination"];

/// Scans of all streams without keys, and of all with keys.
fn both_scans(name: &OutboxName, next: &[&str]) -> String {
    let plain = scan(name, "plain", which(false), "true", next);
    let keyed = scan(name, "keyed", which(true), "true", next);
    format!("WITH RECURSIVE {plain}, {keyed}")
}

/// The first message of each stream, starting at `from`. `next`: the columns that tell one stream from the next.
fn scan(name: &OutboxName, scan: &str, which: &str, from: &str, next: &[&str]) -> String {
    let of = |table: &str| {
        let columns: Vec<String> = next.iter().map(|one| format!("{table}.{one}")).collect();
        columns.join(", ")
    };
    format!(
        "{scan} AS (
            ({first})
            UNION ALL
            (SELECT next.* FROM {scan} CROSS JOIN LATERAL ({next}) next)
         )",
        first = first_of_next(name, which, from),
        next = first_of_next(name, which, &format!("({}) > ({})", of("o"), of(scan))),
    )
}

fn first_of_next(name: &OutboxName, which: &str, within: &str) -> String {
    format!(
        "SELECT o.topic, o.destination, o.available_at, o.sequence
           FROM {outbox} o
          WHERE {which} AND {within}
          ORDER BY o.topic, o.destination, o.available_at, o.sequence LIMIT 1",
        outbox = name.outbox()
    )
}

/// The message belongs to this stream.
pub(crate) fn is_of(stream: &Stream) -> On<'_, candidate::table> {
    let Topic { topic, destination } = &stream.topic;
    let is_there = candidate::topic
        .eq(topic)
        .and(candidate::destination.eq(destination));
    match stream.is_keyed {
        true => Box::new(is_there.and(candidate::ordering_key.is_not_null())),
        false => Box::new(is_there.and(candidate::ordering_key.is_null())),
    }
}

#[cfg(test)]
mod tests {
    use diesel::Connection;
    use diesel::connection::SimpleConnection;

    use super::*;
    use crate::setup::sql::migrate;
    use crate::setup::sql::migrate::EndpointTables::WithOutbox;
    use crate::sql::tests::Outbox;

    #[test]
    fn streams_are_found_beside_any_set_of_known_ones() {
        let outbox = Outbox::new();
        let mut conn = outbox.connect();
        conn.batch_execute(&format!(
            "INSERT INTO {} (topic, destination, ordering_key, payload, available_at)
             SELECT topic, destination, key, '1', '2026-01-01Z'::timestamptz + n * interval '1 hour'
               FROM unnest(ARRAY['a', 'a.b', 'B', 'ä', '\u{10ffff}']) topic,
                    unnest(ARRAY['', 'one', 'two']) destination,
                    unnest(ARRAY[NULL, 'k']) key, generate_series(1, 2) n
              WHERE (topic = 'a.b') IS DISTINCT FROM (destination <> 'one')",
            outbox.name.outbox()
        ))
        .expect("messages");
        let mut all = streams(&mut conn, &outbox.name).expect("all");
        all.sort_by_key(|found| format!("{:?}", found.stream));
        assert_eq!(all.len(), 18);
        let first = all.iter().map(|found| found.first.available_at).max();
        assert_eq!(
            first,
            all.iter().map(|found| found.first.available_at).min()
        );
        // Many subsets, by the bits of a number.
        for known in (0..1 << all.len()).step_by(4_099) {
            let is_known = |n: usize| known & (1 << n) != 0;
            let (known, unknown): (Vec<_>, Vec<_>) =
                all.iter().enumerate().partition(|(n, _)| is_known(*n));
            let known: Vec<Stream> = known
                .into_iter()
                .map(|(_, one)| one.stream.clone())
                .collect();
            let mut found = streams_beside(&mut conn, &outbox.name, &known).expect("the others");
            found.sort_by_key(|found| format!("{:?}", found.stream));
            let unknown: Vec<FoundStream> =
                unknown.into_iter().map(|(_, one)| one.clone()).collect();
            assert_eq!(found, unknown, "beside {known:?}");
        }
        // A known stream without messages.
        let gone = Stream {
            topic: Topic {
                topic: "b".to_owned(),
                destination: String::new(),
            },
            is_keyed: true,
        };
        let found = streams_beside(&mut conn, &outbox.name, &[gone]).expect("the others");
        assert_eq!(found.len(), all.len());
    }

    #[test]
    fn messages_tell_their_streams_and_where_each_begins() {
        let outbox = Outbox::new();
        let mut conn = outbox.connect();
        conn.batch_execute(&format!(
            "INSERT INTO {} (topic, destination, ordering_key, payload, available_at)
             SELECT CASE WHEN n = 1 THEN 'old' ELSE 'a' END, destination, key, '1', now() - n * interval '1 s'
               FROM generate_series(1, 3) n,
                    unnest(ARRAY['', 'one'], ARRAY[NULL, 'k']) AS of(destination, key)
              ORDER BY n",
            outbox.name.outbox()
        ))
        .expect("messages");
        let mut found = streams_behind(&mut conn, &outbox.name, 2).expect("streams");
        let mut all = streams(&mut conn, &outbox.name).expect("all");
        all.retain(|one| one.stream.topic.topic == "a");
        for found in [&mut found, &mut all] {
            found.sort_by_key(|one| one.stream.is_keyed);
        }
        assert_eq!((found.len(), found), (2, all));
    }

    #[test]
    fn streams_are_in_the_order_of_the_databases_encoding() {
        let url = std::env::var("DATABASE_URL").expect("a server, as for the other tests");
        let mut url = url::Url::parse(&url).expect("a URL");
        let connect = |url: &url::Url| PgConnection::establish(url.as_str()).expect("a server");
        let mut server = connect(&url);
        let database = format!("latin2_{}", uuid::Uuid::now_v7().simple());
        let create = "ENCODING 'LATIN2' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0";
        server
            .batch_execute(&format!("CREATE DATABASE {database} {create}"))
            .expect("a database");
        url.set_path(&database);
        let mut conn = connect(&url);
        let name = OutboxName::default();
        migrate::migrate(&mut conn, &name, WithOutbox).expect("migrations run");
        conn.batch_execute(
            "INSERT INTO outbox (topic, payload) SELECT topic, '1' FROM unnest(ARRAY['z', 'Ą', 'á']) topic",
        )
        .expect("messages");
        let topics = |found: Vec<FoundStream>| -> Vec<String> {
            found
                .into_iter()
                .map(|found| found.stream.topic.topic)
                .collect()
        };
        let all = streams(&mut conn, &name).expect("all");
        let known = [all[1].stream.clone(), all[2].stream.clone()];
        assert_eq!(topics(all), ["z", "Ą", "á"], "by their bytes in LATIN2");
        let found = streams_beside(&mut conn, &name, &known).expect("the other");
        drop(conn);
        server
            .batch_execute(&format!("DROP DATABASE {database} WITH (FORCE)"))
            .expect("removed");
        assert_eq!(topics(found), ["z"]);
    }
}

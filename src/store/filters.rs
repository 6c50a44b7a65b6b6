//! Evaluates the filters of registered destinations for messages.
//!
//! The server evaluates pairs of a payload and a filter, one after another, and measures each evaluation by itself. No
//! table is read: the payloads and the filters are values of the call, so no lock and no other transaction delays it.
//! Each payload is cast once. An error for a pair is the answer for this pair only.

use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::result::{Error, QueryResult};
use diesel::sql_types::{Array, Integer, Text};
use diesel::{Connection, PgConnection, RunQueryDsl};

use super::millis;
use super::statement::{statement, unprepared_statement};

/// After this time the server begins no further evaluation of a call.
const SLICE: Duration = Duration::from_millis(200);
/// The time for the casts of a call, for each MiB of payloads. A cast takes about 15 ms.
const CAST_OF_A_MIB: Duration = Duration::from_millis(100);

/// Pairs of a payload and a filter. The pairs of a payload follow one another.
#[derive(Debug, Default)]
pub(crate) struct Pairs<'a> {
    pub(crate) payloads: Vec<&'a str>,
    pub(crate) filters: Vec<&'a str>,
    /// The places of the payload and of the filter of each pair.
    pub(crate) pairs: Vec<(usize, usize)>,
}

/// The result of the evaluation of a filter for a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Evaluated {
    Matches,
    DoesNot,
    /// PostgreSQL cannot evaluate the filter for this payload.
    Failed(String),
    /// The evaluation did not end: it was cancelled, or the server has a shortage.
    Unfinished(Unfinished),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unfinished {
    /// The time of this evaluation.
    pub(crate) took: Duration,
    /// The time of a fixed piece of work just after it, which shows how busy the server is.
    pub(crate) control: Duration,
    /// The error, if the evaluation was not cancelled.
    pub(crate) error: Option<String>,
}

/// The block that evaluates the pairs. Its values and its results are settings of the transaction, because a block has
/// neither parameters nor rows. A function would need an owner, a schema and rights.
///
/// `query_canceled` is the end of the time limit. An evaluation that is cut short by a shortage of the server (classes
/// 08, 40, 53, 57 and 58) is no answer.
///
/// Text: a block, and operators of `jsonpath`.
const BLOCK: &str = r"DO $block$
DECLARE
    began CONSTANT timestamptz := clock_timestamp();
    slice CONSTANT interval := current_setting('diesel_outbox.slice') || ' ms';
    payloads CONSTANT text[] := current_setting('diesel_outbox.payloads');
    filters CONSTANT text[] := current_setting('diesel_outbox.filters');
    of_payloads CONSTANT int[] := current_setting('diesel_outbox.of_payloads');
    of_filters CONSTANT int[] := current_setting('diesel_outbox.of_filters');
    payload jsonb;
    known int := 0;
    unreadable text;
    path jsonpath;
    since timestamptz;
    took interval;
    answer text;
    answers text := '';
    notes jsonb := '[]';
BEGIN
    FOR pair IN 1 .. cardinality(of_payloads) LOOP
        since := clock_timestamp();
        BEGIN
            IF of_payloads[pair] <> known THEN
                unreadable := NULL;
                known := of_payloads[pair];
                BEGIN
                    payload := payloads[known];
                EXCEPTION WHEN OTHERS THEN
                    IF left(SQLSTATE, 2) IN ('08', '40', '53', '57', '58') THEN
                        RAISE;
                    END IF;
                    unreadable := SQLERRM;
                END;
            END IF;
            path := filters[of_filters[pair]];
            since := clock_timestamp();
            IF unreadable IS NOT NULL THEN
                answer := 'e';
                notes := notes || jsonb_build_array(jsonb_build_array(pair, unreadable, 0, 0));
            ELSIF jsonb_path_query_first(payload, path, '{}', true) NOT IN ('false', 'null') THEN
                answer := 'y';
            ELSE
                answer := 'n';
            END IF;
        EXCEPTION
            WHEN query_canceled THEN
                answer := '-';
            WHEN OTHERS THEN
                answer := CASE WHEN left(SQLSTATE, 2) IN ('08', '40', '53', '57', '58') THEN '-' ELSE 'e' END;
                notes := notes || jsonb_build_array(jsonb_build_array(pair, SQLERRM, 0, 0));
        END;
        took := clock_timestamp() - since;
        answers := answers || answer;
        IF answer = '-' THEN
            since := clock_timestamp();
            PERFORM count(*) FROM generate_series(1, 100000);
            notes := notes || jsonb_build_array(jsonb_build_array(pair, NULL,
                (extract(epoch FROM took) * 1000000)::bigint,
                (extract(epoch FROM clock_timestamp() - since) * 1000000)::bigint));
            EXIT;
        END IF;
        EXIT WHEN clock_timestamp() - began > slice;
    END LOOP;
    PERFORM set_config('diesel_outbox.answers', answers, true), set_config('diesel_outbox.notes', notes::text, true);
END
$block$";

/// A pair (from 1), its error, and in microseconds the time of the evaluation and of the control.
type Note = (usize, Option<String>, u64, u64);

/// Evaluates the first pairs, at least one: as many as [`SLICE`] allows. Cancels an evaluation after `limit` or a
/// little later.
///
/// Needs a transaction of its own.
pub(crate) fn evaluate(
    conn: &mut PgConnection,
    asked: &Pairs<'_>,
    limit: Duration,
) -> QueryResult<Vec<Evaluated>> {
    let bytes: usize = asked.payloads.iter().map(|payload| payload.len()).sum();
    let mib = u32::try_from(bytes >> 20)
        .unwrap_or(u32::MAX)
        .saturating_add(1);
    let limit = limit + SLICE + CAST_OF_A_MIB.saturating_mul(mib);
    let from_one = |place: usize| i32::try_from(place + 1).unwrap_or(i32::MAX);
    let (of_payloads, of_filters): (Vec<i32>, Vec<i32>) = (asked.pairs.iter())
        .map(|(payload, filter)| (from_one(*payload), from_one(*filter)))
        .unzip();
    let (answers, notes) = conn.transaction(|conn| {
        // Text: `set_config`. Planned anew, because a kept statement would keep its values in memory.
        unprepared_statement(
            "SELECT set_config('diesel_outbox.payloads', $1::text, true),
                    set_config('diesel_outbox.filters', $2::text, true),
                    set_config('diesel_outbox.of_payloads', $3::text, true),
                    set_config('diesel_outbox.of_filters', $4::text, true),
                    set_config('diesel_outbox.slice', $5, true),
                    set_config('statement_timeout', $6, true)",
        )
        .bind::<Array<Text>, _>(&asked.payloads)
        .bind::<Array<Text>, _>(&asked.filters)
        .bind::<Array<Integer>, _>(of_payloads)
        .bind::<Array<Integer>, _>(of_filters)
        .bind::<Text, _>(millis(SLICE).to_string())
        .bind::<Text, _>(millis(limit).to_string())
        .execute(conn)?;
        conn.batch_execute(BLOCK)?;
        statement(
            "SELECT current_setting('diesel_outbox.answers'), current_setting('diesel_outbox.notes')",
        )
        .giving::<(Text, Text)>()
        .get_result::<(String, String)>(conn)
    })?;
    let unreadable = |error: serde_json::Error| Error::DeserializationError(error.into());
    let notes: Vec<Note> = serde_json::from_str(&notes).map_err(unreadable)?;
    let evaluated = answers.chars().zip(1..).map(|(answer, pair)| {
        let notes = || notes.iter().filter(|(of, ..)| *of == pair);
        let error = || notes().find_map(|(_, error, ..)| error.clone());
        let micros =
            |of: fn(&Note) -> u64| Duration::from_micros(notes().map(of).max().unwrap_or_default());
        match answer {
            'y' => Evaluated::Matches,
            'n' => Evaluated::DoesNot,
            'e' => Evaluated::Failed(error().unwrap_or_default()),
            _ => Evaluated::Unfinished(Unfinished {
                took: micros(|note| note.2),
                control: micros(|note| note.3),
                error: error(),
            }),
        }
    });
    Ok(evaluated.collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::Outbox;

    fn answers(pairs: &Pairs<'_>, limit: Duration) -> Vec<Evaluated> {
        let mut conn = Outbox::new().connect();
        let mut answers: Vec<Evaluated> = Vec::new();
        // A call may end early on a busy machine.
        while answers.len() < pairs.pairs.len() {
            let rest = Pairs {
                payloads: pairs.payloads.clone(),
                filters: pairs.filters.clone(),
                pairs: pairs.pairs[answers.len()..].to_vec(),
            };
            answers.extend(evaluate(&mut conn, &rest, limit).expect("evaluated"));
        }
        answers
    }

    /// R50
    #[test]
    fn each_pair_has_its_own_answer_and_an_error_is_the_answer_of_one_pair() {
        let deep = format!("{}{}", "[".repeat(12_000), "]".repeat(12_000));
        let pairs = Pairs {
            payloads: vec![
                r#"{"euro": 150, "text": "it's {\"quoted\",\\}"}"#,
                r#"{"bad": "\u0000"}"#,
                r#"{"at": "2026-01-02T03:04:05+02:00"}"#,
                &deep,
                r#"{"euro": null}"#,
            ],
            filters: vec![
                "$.euro ? (@ >= 100)",
                r#"$.at.datetime() < "2026-05-01".datetime()"#,
                "$.** ? (@ == 1)",
                r#"$.text ? (@ starts with "it's {\"quoted")"#,
                "$.euro",
            ],
            pairs: vec![
                (0, 0),
                (0, 1),
                (0, 3),
                (1, 0),
                (2, 1),
                (3, 2),
                (4, 0),
                (4, 4),
            ],
        };
        let answers = answers(&pairs, Duration::from_secs(60));
        let failed = |at: usize| match &answers[at] {
            Evaluated::Failed(error) => error.clone(),
            other => panic!("{at}: {other:?}"),
        };
        assert_eq!(
            answers[..3],
            [Evaluated::Matches, Evaluated::DoesNot, Evaluated::Matches]
        );
        assert!(failed(3).contains("Unicode"), "{}", failed(3));
        assert!(failed(4).contains("time zone"), "{}", failed(4));
        assert!(failed(5).contains("stack depth"), "{}", failed(5));
        assert_eq!(answers[6..], [Evaluated::DoesNot, Evaluated::DoesNot]);
    }

    /// R50: a slow filter ends the call, and the answers before it count.
    #[test]
    fn a_slow_evaluation_is_cancelled_with_its_own_time() {
        let items: Vec<String> = (1..=20_000).map(|n| n.to_string()).collect();
        let items = format!(r#"{{"items": [{}]}}"#, items.join(","));
        let pairs = Pairs {
            payloads: vec![&items],
            filters: vec![
                "$.items[0]",
                "$.items[*] ? (exists ($.items[*] ? (@ == -1)))",
            ],
            pairs: vec![(0, 0), (0, 1)],
        };
        let limit = Duration::from_millis(100);
        let answers = answers(&pairs, limit);
        assert_eq!(answers[0], Evaluated::Matches);
        let Evaluated::Unfinished(Unfinished {
            took,
            control,
            error,
        }) = &answers[1]
        else {
            panic!("{answers:?}");
        };
        assert!(
            *took >= limit && !control.is_zero() && error.is_none(),
            "{answers:?}"
        );
    }
}

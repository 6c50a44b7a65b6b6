//! Compares the schema of the outbox with the schema that this version creates.

use diesel::PgConnection;
use diesel::result::QueryResult;

use super::{Finding, Findings, Severity};
use crate::config::Config;
use crate::doctor::sql::drift::{self, Compared, SchemaPart};

/// Columns that every claim changes.
const CLAIMED: [&str; 3] = ["locked_by", "locked_at", "attempts"];

pub(super) fn drift(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("drift");
    for function in drift::other_functions(conn, &config.table)? {
        found.warning(
            format!("the function {function} differs from this version"),
            "replace it with the function that `diesel-outbox migrate --print` shows (CREATE OR REPLACE FUNCTION)",
        );
    }
    if !drift::can_compare(conn)? {
        found.add(
            Severity::Skipped,
            "tables were not compared with this version: this needs the right to create a schema"
                .to_owned(),
            Some("run `check` once as the role that runs migrations".to_owned()),
        );
        return Ok(found.all);
    }
    compare(&mut found, &drift::compare(conn, &config.table)?);
    Ok(
        found
            .or_ok("tables, indexes, constraints, triggers, view and functions match this version"),
    )
}

fn compare(found: &mut Findings, both: &Compared) {
    let same = |a: &SchemaPart, b: &SchemaPart| {
        (&a.kind, &a.table_name, &a.name) == (&b.kind, &b.table_name, &b.name)
    };
    for made in &both.made {
        match both.found.iter().find(|part| same(part, made)) {
            Some(part) if part.definition == made.definition => {}
            Some(part) => differs(found, part, made, &both.schema),
            None => is_missing(found, made, &both.schema),
        }
    }
    let is_more = |part: &&SchemaPart| !both.made.iter().any(|made| same(part, made));
    for index in both
        .found
        .iter()
        .filter(is_more)
        .filter(|part| part.kind == "index")
    {
        if CLAIMED
            .iter()
            .any(|column| index.definition.contains(column))
        {
            found.warning(
                format!(
                    "the index {} has a column that every claim changes: claims cannot be HOT updates",
                    index.name
                ),
                format!("DROP INDEX CONCURRENTLY {}.\"{}\"", both.schema, index.name),
            );
        }
    }
}

/// The quoted name of the table, with the schema.
fn table_of(part: &SchemaPart, schema: &str) -> String {
    format!("{schema}.\"{}\"", part.table_name)
}

fn differs(found: &mut Findings, part: &SchemaPart, made: &SchemaPart, schema: &str) {
    let table = table_of(part, schema);
    match part.kind.as_str() {
        "table" if part.definition.starts_with('u') => found.error(
            format!("{table} is UNLOGGED: a crash of the server empties it"),
            format!("ALTER TABLE {table} SET LOGGED"),
        ),
        "table" => found.warning(
            format!("{table} has row-level security: a relay refuses to work if rows are hidden from it"),
            format!("ALTER TABLE {table} DISABLE ROW LEVEL SECURITY"),
        ),
        "option" => found.warning(
            format!("{table} has {} = {} instead of {}", part.name, part.definition, made.definition),
            format!("ALTER TABLE {table} SET ({} = {})", made.name, made.definition),
        ),
        "trigger" if part.definition.ends_with("(disabled)") => found.warning(
            format!("the trigger {} of {table} is disabled: {}", part.name, consequence(&part.name)),
            format!("ALTER TABLE {table} ENABLE TRIGGER {}", part.name),
        ),
        kind => found.warning(
            format!(
                "the {kind} {} of {table} differs: {} instead of {}",
                part.name,
                shortened(&part.definition),
                shortened(&made.definition)
            ),
            "compare with `diesel-outbox migrate --print`: it was changed by hand, or belongs to another version",
        ),
    }
}

fn is_missing(found: &mut Findings, made: &SchemaPart, schema: &str) {
    let table = table_of(made, schema);
    match made.kind.as_str() {
        "index" => found.error(
            format!("the index {} of {table} is missing", made.name),
            // ON ONLY is the index of a partitioned table, which PostgreSQL cannot build CONCURRENTLY.
            match made.definition.contains(" ON ONLY ") {
                true => made
                    .definition
                    .replacen(" ON ONLY ", &format!(" ON {schema}."), 1),
                false => made
                    .definition
                    .replacen(" INDEX ", " INDEX CONCURRENTLY ", 1)
                    .replacen(" ON ", &format!(" ON {schema}."), 1),
            },
        ),
        "constraint" => {
            let what = format!("the constraint {} of {table} is missing", made.name);
            let advice = format!(
                "ALTER TABLE {table} ADD CONSTRAINT \"{}\" {}",
                made.name, made.definition
            );
            match made.definition.starts_with("CHECK") {
                true => found.warning(what, advice),
                false => found.error(what, advice),
            }
        }
        "option" => found.warning(
            format!("{table} has no {}", made.name),
            format!(
                "ALTER TABLE {table} SET ({} = {})",
                made.name, made.definition
            ),
        ),
        "trigger" => found.warning(
            format!(
                "{table} has no trigger {}: {}",
                made.name,
                consequence(&made.name)
            ),
            match made.name.starts_with("outbox_endpoint_most") {
                true => format!(
                    "SELECT outbox_endpoint_limit('{}.{}', 1000)",
                    schema.trim_matches('"'),
                    made.table_name.trim_end_matches("_endpoint")
                ),
                false => made
                    .definition
                    .replacen(" ON ", &format!(" ON {schema}."), 1),
            },
        ),
        kind => found.error(
            format!("the {kind} {} of {table} is missing", made.name),
            "diesel-outbox migrate",
        ),
    }
}

/// What does not happen without a trigger.
fn consequence(trigger: &str) -> &'static str {
    match trigger {
        "outbox_wake" => "commits do not wake relays",
        "outbox_address" => {
            "a message may reach another endpoint that got the name of a removed one"
        }
        "outbox_endpoint_wake" => "changes of endpoints do not wake relays",
        "outbox_endpoint_changes" => "relays do not see changes of endpoints",
        "outbox_endpoint_gone" => "messages of a removed endpoint stay in the outbox",
        "outbox_endpoint_emptied" => {
            "messages of endpoints that TRUNCATE removes stay in the outbox"
        }
        "outbox_endpoint_there" => {
            "messages that name an endpoint that was removed and registered again end unsent"
        }
        "outbox_endpoint_changed" => "relays see changed endpoints ten minutes later",
        "outbox_endpoint_most" | "outbox_endpoint_most_moved" => {
            "nothing limits the endpoints of a tenant"
        }
        _ => "messages that break this rule are not refused",
    }
}

fn shortened(text: &str) -> String {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(120) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// Checks the indexes by facts that every role may read.
pub(super) fn indexes(conn: &mut PgConnection, config: &Config) -> QueryResult<Vec<Finding>> {
    let mut found = Findings::new("indexes");
    for index in drift::invalid_indexes(conn, &config.table)? {
        found.error(
            format!("the index {index} is not valid and not used: its build was interrupted"),
            format!("REINDEX INDEX CONCURRENTLY {index}"),
        );
    }
    // If the outbox can be compared, `drift` reports missing indexes, with the statements that create them.
    if !drift::can_compare(conn)? {
        for index in drift::missing_indexes(conn, &config.table)? {
            found.error(
                format!("the index {index} is missing"),
                "create it as `diesel-outbox migrate --print` shows, with CONCURRENTLY",
            );
        }
    }
    Ok(found.or_ok("all indexes exist and are valid"))
}

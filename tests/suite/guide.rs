//! The guide's SQL runs, and its list of pages is complete.

use diesel::Connection;
use diesel::connection::SimpleConnection;
use diesel::result::Error;

use crate::fresh::FreshDatabase;
use crate::support::{binary, finish};

/// The pages: name and text.
fn pages() -> Vec<(String, String)> {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs");
    let mut pages: Vec<(String, String)> = std::fs::read_dir(folder)
        .expect("docs/ is there")
        .map(|entry| entry.expect("readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .map(|path| {
            let name = path.file_name().expect("a name").to_string_lossy();
            let text = std::fs::read_to_string(&path).expect("UTF-8");
            (name.into_owned(), text)
        })
        .collect();
    pages.sort();
    pages
}

/// The blocks of one language.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let begin = format!("```{language}\n");
    let of_language = text.split(&begin).skip(1);
    of_language
        .map(|rest| rest.split("```").next().unwrap_or_default().to_owned())
        .collect()
}

/// Each block runs in a transaction that is rolled back, because roles belong to the whole server.
#[test]
fn the_sql_of_the_guide_runs() {
    let database = FreshDatabase::new();
    let migrate = finish(binary(&["migrate", "--print"])).code(0).stdout;
    database.execute(&migrate);
    database.execute(
        "CREATE TABLE inbox (source text, message_id text, PRIMARY KEY (source, message_id));
         CREATE TABLE old_outbox (id uuid PRIMARY KEY, topic text, payload jsonb, aggregate_id text,
             available_at timestamptz, created_at timestamptz, published_at timestamptz, attempts int);
         INSERT INTO old_outbox VALUES
             (gen_random_uuid(), 't', '{\"n\": 1}', 'a', now(), now(), NULL, 1)",
    );
    let mut conn = database.connect();
    let mut count = 0;
    for (page, text) in pages() {
        for sql in blocks(&text, "sql") {
            let sql = sql.replace("BEGIN;", "").replace("COMMIT;", "");
            let run = conn.transaction::<(), Error, _>(|conn| {
                if sql.contains("outbox_enqueuer") {
                    conn.batch_execute(include_str!("../../docs/roles.sql"))?;
                    conn.batch_execute("CREATE ROLE shop")?;
                }
                conn.batch_execute(&sql)?;
                Err(Error::RollbackTransaction)
            });
            assert_eq!(run, Err(Error::RollbackTransaction), "{page}: {sql}");
            count += 1;
        }
    }
    assert!(count >= 8, "{count} blocks");
}

/// The example is built and tested as a project of its own.
#[test]
fn the_mount_for_rocket_in_the_guide_is_that_of_the_example() {
    let example = include_str!("../../examples/rocket-shop/src/pages.rs");
    let (_, portal) = pages()
        .into_iter()
        .find(|(name, _)| name == "portal.md")
        .expect("the page");
    let block = blocks(&portal, "rust,ignore")
        .into_iter()
        .find(|block| block.contains("impl Handler for Mounted"))
        .expect("the mount");
    assert!(example.ends_with(&block), "{block}");
}

#[test]
fn messages_that_the_guide_copies_arrive_in_their_order() {
    let database = FreshDatabase::new();
    let migrate = finish(binary(&["migrate", "--print"])).code(0).stdout;
    database.execute(&migrate);
    database.execute(
        "CREATE TABLE old_outbox (id uuid PRIMARY KEY, topic text, payload jsonb, aggregate_id text,
             available_at timestamptz, created_at timestamptz, published_at timestamptz, attempts int);
         INSERT INTO old_outbox
         SELECT gen_random_uuid(), 't', to_jsonb(n), 'a', now(), now() - n * interval '1 minute',
                CASE WHEN n > 90 THEN now() END, 0
           FROM generate_series(1, 100) n",
    );
    let page = include_str!("../../docs/compared.md");
    let blocks = blocks(page, "sql");
    database.execute(&blocks[0]);
    let in_order = "SELECT count(*) FROM (SELECT payload::text::int AS n,
                        lag(payload::text::int) OVER (ORDER BY sequence) AS before FROM outbox) o
                     WHERE before IS NULL OR n = before - 1";
    assert_eq!(database.number(in_order), 90);
    let left = "SELECT count(*) FROM old_outbox WHERE published_at IS NULL";
    assert_eq!(database.number(left), 0);

    // From now on the old writers' inserts are forwarded.
    database.execute(&blocks[1]);
    database.execute(
        "INSERT INTO old_outbox (id, topic, payload) VALUES (gen_random_uuid(), 't', '0')",
    );
    assert_eq!(database.number("SELECT count(*) FROM outbox"), 91);
    assert_eq!(database.number(left), 0);
}

#[test]
fn every_page_is_a_module_of_the_guide_in_its_list_and_in_the_book() {
    let book = include_str!("../../docs/SUMMARY.md");
    let guide = include_str!("../../src/guide.rs");
    let list = include_str!("../../docs/README.md");
    let own = "https://github.com/diesel-outbox/diesel-outbox/blob/main/";
    let folder = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    for (page, text) in pages() {
        // The contents of the book.
        if page == "SUMMARY.md" {
            continue;
        }
        assert!(book.contains(&format!("]({page})")), "{page}");
        // Decisions and failures are for contributors.
        if !["README.md", "decisions.md", "failures.md"].contains(&&*page) {
            assert!(guide.contains(&format!("../docs/{page}")), "{page}");
        }
        assert!(
            page == "README.md" || list.contains(&format!("]({page})")),
            "{page}"
        );
        for link in text.split(own).skip(1) {
            let name = link.split(|c: char| c.is_whitespace() || "#)".contains(c));
            let name = name.into_iter().next().unwrap_or_default();
            assert!(folder.join(name).is_file(), "{page} links to {name}");
        }
    }
}

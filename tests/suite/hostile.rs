//! A role whose only right is to create in a schema of the search path makes its own functions, operators and types,
//! so that other people's statements would mean these. Our statements never call one of them.

use std::collections::BTreeSet;
use std::time::Duration;

use diesel::connection::SimpleConnection;
use diesel::{Connection, PgConnection, RunQueryDsl};
use diesel_outbox::admin::{self, Selection};
use diesel_outbox::config::{SecretKeys, SigningSecret};
use diesel_outbox::endpoints::{Endpoint, EndpointError, EndpointFilter};
use diesel_outbox::handlers::HandlerError;
use diesel_outbox::program;
use diesel_outbox::{
    Aggregate, Answer, Destination, Due, EnqueueError, Events, MessageRef, Outbox, OutboxName,
    Relay, inbox,
};
use serde_json::json;

use crate::fresh::FreshDatabase;
use crate::page::Page;
use crate::support::{Receiver, binary, database_url, end, eventually, finish, message};

/// The types that our statements compare, add and convert.
const TYPES: &str = "{int4,int8,float8,numeric,text,name,\"\\\"char\\\"\",bool,timestamptz,interval,uuid,bytea,json,oid,tid,regclass,int8[],int4[],text[],timestamptz[],uuid[],bool[]}";

/// The operators that our statements use, or might use.
const OPERATORS: &str = "{=,<>,<,<=,>,>=,+,-,*,/,||,~,!~,~~}";

/// A database with an outbox, in which a role without other rights has made twins of every function, operator and
/// type in question. The fields drop in this order, because a role can be dropped only when it owns nothing.
struct Ground {
    database: FreshDatabase,
    role: Role,
}

struct Role(String);

impl Drop for Role {
    fn drop(&mut self) {
        if let Ok(mut conn) = PgConnection::establish(&database_url()) {
            let _ = conn.batch_execute(&format!("DROP ROLE {}", self.0));
        }
    }
}

impl Ground {
    fn new() -> Self {
        let database = FreshDatabase::new();
        let role = Role(format!("{}_hostile", database.name));
        let name: OutboxName = "outbox".parse().expect("a name");
        diesel_outbox::migrate(&mut database.connect(), &name).expect("migrations run");
        let ground = Self { database, role };
        ground.make_twins();
        ground
    }

    /// Makes a twin of each function that our sources name and PostgreSQL has, with one and two arguments of all
    /// these types. Also makes twins of all operators for these types, and domains named like PostgreSQL's types.
    /// Each twin records its calls. The schema comes before `pg_catalog` in everyone's search path, so even a twin
    /// with exactly the same types is preferred.
    fn make_twins(&self) {
        let names: Vec<String> = names_in_our_sql().into_iter().collect();
        let sql = format!(
            "CREATE ROLE {role};
             GRANT CREATE ON SCHEMA public TO PUBLIC;
             CREATE SEQUENCE public.called;
             GRANT USAGE ON SEQUENCE public.called TO PUBLIC;
             SET ROLE {role};
             SET search_path = pg_catalog;
             CREATE FUNCTION public.note(what pg_catalog.text) RETURNS pg_catalog.void LANGUAGE plpgsql
                SET search_path = pg_catalog AS $f$
                BEGIN
                    PERFORM nextval('public.called');
                    RAISE EXCEPTION 'hostile: % was called by %', what, current_user;
                END $f$;
             DO $do$
             DECLARE
                types text[] := '{TYPES}';
                names text[] := '{{{names}}}';
                arguments text; a text; b text; f record; result text; op text;
                body text := 'LANGUAGE plpgsql AS $b$ BEGIN PERFORM public.note(%L); END $b$';
             BEGIN
                FOR f IN SELECT DISTINCT proname, pronargs, CASE WHEN prorettype IN
                                ('anyelement'::regtype, 'anyarray'::regtype, 'record'::regtype, 'internal'::regtype)
                                OR prorettype::regtype::text LIKE 'any%' THEN 'pg_catalog.int4'
                                ELSE 'pg_catalog.' || (SELECT quote_ident(typname) FROM pg_type t WHERE t.oid = prorettype) END AS result
                           FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace
                            AND proname = ANY(names) AND pronargs <= 2 LOOP
                    FOREACH a IN ARRAY CASE f.pronargs WHEN 0 THEN '{{none}}'::text[] ELSE types END LOOP
                        FOREACH b IN ARRAY CASE f.pronargs WHEN 2 THEN types ELSE '{{none}}'::text[] END LOOP
                            arguments := CASE f.pronargs WHEN 0 THEN '' WHEN 1 THEN a ELSE a || ', ' || b END;
                            BEGIN
                                EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s ' || body, f.proname, arguments, f.result,
                                    f.proname || '(' || arguments || ')');
                            EXCEPTION WHEN OTHERS THEN NULL; -- not all of their types can be returned
                            END;
                        END LOOP;
                    END LOOP;
                END LOOP;
                FOREACH op IN ARRAY '{OPERATORS}'::text[] LOOP
                    FOREACH a IN ARRAY types LOOP
                        FOREACH b IN ARRAY types LOOP
                            result := CASE WHEN op IN ('+', '-', '*', '/', '||') THEN a ELSE 'bool' END;
                            EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s ' || body, 'operator ' || op, a, b, result,
                                a || ' ' || op || ' ' || b);
                            EXECUTE format('CREATE OPERATOR public.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = public.%I)',
                                op, a, b, 'operator ' || op);
                        END LOOP;
                    END LOOP;
                END LOOP;
                FOREACH a IN ARRAY '{{text,json,uuid,bytea,timestamptz,int8,int4,float8,oid,regclass,name}}'::text[] LOOP
                    EXECUTE format('CREATE DOMAIN public.%I AS pg_catalog.%I CHECK (public.note(%L) IS NULL)', a, a, 'type ' || a);
                END LOOP;
             END $do$;
             RESET ROLE;
             ALTER DATABASE {database} SET search_path = public, pg_catalog;",
            role = self.role.0,
            names = names.join(","),
            database = self.database.name,
        );
        self.database.execute(&sql);
        let made = self.count(
            "SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proowner <> 10",
        );
        assert!(made > 5000, "only {made} twins were made");
    }

    /// Reads one number with PostgreSQL's own functions.
    fn count(&self, select: &str) -> i64 {
        let mut conn = self.database.connect();
        conn.batch_execute("SET search_path = pg_catalog")
            .expect("set");
        diesel::select(diesel::dsl::sql::<diesel::sql_types::BigInt>(&format!(
            "({select})::bigint"
        )))
        .get_result(&mut conn)
        .unwrap_or_else(|error| panic!("{select}: {error}"))
    }

    fn execute(&self, sql: &str) {
        let mut conn = self.database.connect();
        conn.batch_execute(&format!("SET search_path = pg_catalog; {sql}"))
            .unwrap_or_else(|error| panic!("{sql}: {error}"));
    }

    fn command(&self, arguments: &[&str]) -> std::process::Command {
        let mut command = binary(arguments);
        command.env("DATABASE_URL", &self.database.url);
        command
    }

    fn calls(&self) -> i64 {
        self.count("SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM public.called")
    }
}

/// Every name in the sources of our statements that may be a function's.
fn names_in_our_sql() -> BTreeSet<String> {
    let root = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
    let mut folders = vec![root.join("src"), root.join("migrations")];
    let mut names = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let is_rust = path.extension().is_some_and(|extension| extension == "rs");
            if is_rust && !path.with_extension("").iter().any(|part| part == "sql") {
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("text");
            for (at, _) in text.match_indices('(') {
                let is_of_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
                let name = text[..at].rsplit(|c: char| !is_of_name(c)).next();
                names.extend(name.filter(|name| name.len() > 1).map(str::to_owned));
            }
        }
    }
    names
}

struct Order(Events);

impl Aggregate for Order {
    fn events(&mut self) -> &mut Events {
        &mut self.0
    }
}

/// R48: from the migration to the cleaner, nothing that a role without other rights has made in the search path is
/// called.
#[test]
fn objects_that_others_create_in_the_search_path_are_never_called() {
    let ground = Ground::new();
    let outbox = Outbox::default();
    let conn = &mut ground.database.connect();

    // An application whose search path is the hostile one.
    conn.transaction::<_, EnqueueError, _>(|conn| {
        let hour = Duration::from_secs(3600);
        outbox.enqueue(
            conn,
            message("good").idempotency_key("a").delay(Duration::ZERO),
        )?;
        outbox.enqueue(
            conn,
            message("good").idempotency_key("a").expires_after(hour),
        )?;
        let future = std::time::SystemTime::now() + hour;
        outbox.enqueue(
            conn,
            message("good").available_at(future).occurred_at(future),
        )?;
        let keyed = (0..20).map(|n| message("keyed").ordering_key(format!("k{}", n % 3)));
        outbox.enqueue_batch(conn, keyed)?;
        outbox.enqueue_bulk(conn, (0..20).map(|_| message("bad").expires_at(future)))?;
        outbox.enqueue_bulk(conn, [message("good").idempotency_key("a")])?;
        let mut order = Order(Events::new());
        order.0.record(message("both"));
        outbox.save(conn, &mut order, |_, _| Ok::<(), EnqueueError>(()))?;
        outbox.enqueue(conn, message("handled"))
    })
    .expect("enqueued");
    assert_eq!(ground.calls(), 0, "by enqueueing");
    // Plain SQL from elsewhere, without a digest, which the library must compare with.
    ground.execute("INSERT INTO public.outbox (topic, payload, idempotency_key) VALUES ('good', '{\"n\":1}', 'plain')");
    let plain = message("good").idempotency_key("plain");
    let plain = conn.transaction(|conn| outbox.enqueue(conn, plain));
    assert!(!plain.expect("the same message").is_new);
    let once = || {
        inbox::once(&mut ground.database.connect(), "a", "1", |_| {
            diesel::QueryResult::Ok(())
        })
    };
    once().expect("handled");
    assert!(once().expect("known").is_duplicate());
    conn.transaction::<_, EnqueueError, _>(|conn| {
        let later = message("good")
            .idempotency_key("later")
            .delay(Duration::from_secs(9));
        outbox.enqueue(conn, later)?;
        let due = Due::After(Duration::from_secs(99));
        outbox.reschedule(conn, MessageRef::key("later"), due)?;
        let changed = outbox.cancel(conn, MessageRef::key("later"))?;
        assert_eq!(changed.answer(), Answer::Done);
        Ok(())
    })
    .expect("cancelled");
    assert_eq!(ground.calls(), 0, "by an application");

    // A relay that uses everything that a relay can do.
    let (good, bad) = (Receiver::ok(), Receiver::answering(|_| 500));
    let relay = || {
        let url = ground.database.url.clone();
        Relay::builder(&ground.database.url)
            .connections(move || PgConnection::establish(&url).map(Box::new))
            .destination(Destination::new("good", &good.url()).expect("a URL"))
            .destination(Destination::new("bad", &bad.url()).expect("a URL"))
            .route("good", "good")
            .route("keyed", "good")
            .route("bad", "bad")
            .route_to_each("both", &["good", "bad"])
            .on_topic_pooled("handled", |_, context| {
                let worked = context.once(|_| Ok::<_, HandlerError>(()));
                worked.map(drop)
            })
            .max_attempts(2)
            .backoff(diesel_outbox::Backoff::Table(vec![Duration::from_millis(
                50,
            )]))
            .poll_interval(Duration::from_millis(50))
            .lease(Duration::from_secs(10))
            .send_timeout(Duration::from_secs(1))
            .retention(Some(Duration::from_secs(1)))
            .configure(|config| config.inbox_retention = Some(Duration::from_secs(1)))
            .start()
            .expect("a relay")
    };
    let first = relay();
    let settled = |status: &str| {
        ground.count(&format!(
            "SELECT count(*) FROM public.outbox_messages WHERE status = '{status}'"
        ))
    };
    eventually("failing messages are dead-lettered", || {
        settled("dead") == 21
    });
    eventually("the cleaner has cleaned", || {
        ground.count("SELECT count(*) FROM public.outbox_ledger") == 0
            && ground.count("SELECT count(*) FROM public.outbox_inbox") == 0
    });
    eventually("the good messages are delivered", || good.count() == 23);
    assert_eq!(ground.count("SELECT count(*) FROM public.outbox"), 1);
    end(&first);
    assert_eq!(ground.calls(), 0, "by the relay");

    // An operator, by the library on a connection of the application, inside the application's transaction.
    let name = OutboxName::default();
    conn.transaction::<_, diesel_outbox::DatabaseError, _>(|conn| {
        let letters = program::dead_letters(conn, &name, &Selection::default(), 100)?;
        assert_eq!(letters.len(), 21);
        assert_eq!(
            admin::requeue(
                conn,
                &name,
                &[letters[0].id(), letters[1].id()],
                &admin::Note::new("alice", "")
            )?,
            2
        );
        assert_eq!(program::overview(conn, &name)?.depths.dead_letters(), 19);
        // The transaction has its own path again: it finds what the application expects.
        assert_eq!(path_of(conn), "public, pg_catalog");
        Ok(())
    })
    .expect("an operator's work");
    // The same by commands and by the page.
    for arguments in [
        &["status"] as &[&str],
        &["status", "--exact"],
        &["migrate"],
        &["leases"],
        &["keys"],
        &["dead", "list"],
        &["dead", "groups"],
        &["dead", "requeue", "--all", "--yes"],
        &["pause", "destination", "good"],
        &["pause", "list"],
        &["resume", "destination", "good"],
        &["replay", "--since", "1h", "--yes"],
    ] {
        let done = finish(ground.command(arguments));
        assert_eq!(ground.calls(), 0, "by {arguments:?}: {}", done.stderr);
        done.code(0);
    }
    let second = relay();
    eventually("the requeued messages have failed again", || {
        settled("dead") == 21
    });
    end(&second);
    let page = Page::start(ground.command(&["admin"]));
    for path in [
        "/",
        "/dead",
        "/messages?key=a",
        "/ledger",
        "/relays",
        "/audit",
        "/keys",
        "/metrics",
    ] {
        assert_eq!(page.get(path).status, 200, "{path}");
        assert_eq!(ground.calls(), 0, "by {path}");
    }
    destinations_are_registered_and_removed(&ground, conn);
    // A second outbox, in the first schema of the caller's path.
    outbox_is_made_and_dropped(&ground, conn);

    // The doctor reports the role that can create in the path.
    let checked = finish(ground.command(&["check"]));
    assert_eq!(ground.calls(), 0, "by check");
    assert!(
        checked
            .stdout
            .contains("REVOKE CREATE ON SCHEMA public FROM PUBLIC"),
        "{}",
        checked.stdout
    );
    assert_ne!(checked.status.code(), Some(0));
}

fn path_of(conn: &mut PgConnection) -> String {
    diesel::select(diesel::dsl::sql::<diesel::sql_types::Text>(
        "pg_catalog.current_setting('search_path')",
    ))
    .get_result(conn)
    .expect("a path")
}

/// Every statement about endpoints, by the library inside and outside the application's transaction,
/// and by commands.
fn destinations_are_registered_and_removed(ground: &Ground, conn: &mut PgConnection) {
    let (outbox, keys) = (Outbox::default(), SecretKeys::random());
    let (plain, tenant) = (outbox.endpoints(), uuid::Uuid::now_v7());
    let with_key = plain.with_keys(&keys);
    let (hour, secret) = (Duration::from_secs(3600), SigningSecret::random());
    let filter = EndpointFilter::default()
        .tenant_id(tenant)
        .enabled(true)
        .search("hooks".to_owned())
        .after("a".to_owned());
    let hook = Endpoint::new("acme", "https://acme.example/hooks")
        .tenant(tenant)
        .filter(json!({"n": [{"numeric": [">", 1]}]}))
        .configure(|hook| {
            hook.policy.timeout = Some(Duration::from_secs(1));
        })
        .header("x-team", "billing");
    let all = |conn: &mut PgConnection| {
        // A new row, and an existing row.
        plain.put(conn, &hook)?;
        plain.put(conn, &hook)?;
        assert_eq!(with_key.encryption(conn)?.plain, 1);
        assert_eq!(with_key.encrypt(conn)?.plain, 1);
        assert!(with_key.rotate(conn, "acme", hour)?.is_some());
        assert!(with_key.rotate_to(conn, "acme", &secret, hour)?);
        assert!(with_key.secret(conn, "acme")?.is_some());
        assert!(with_key.get(conn, "acme")?.is_some());
        assert_eq!(with_key.list(conn, &filter, 10)?.len(), 1);
        assert!(plain.disable(conn, "acme", "why")?);
        assert!(plain.enable(conn, "acme")?);
        assert!(plain.remove(conn, "acme")?);
        Ok::<_, EndpointError>(())
    };
    all(conn).expect("outside a transaction");
    conn.transaction(|conn| {
        all(conn)?;
        assert_eq!(path_of(conn), "public, pg_catalog");
        Ok::<_, EndpointError>(())
    })
    .expect("inside a transaction");
    assert_eq!(path_of(conn), "public, pg_catalog");
    assert_eq!(ground.calls(), 0, "by the methods of destinations");
    for arguments in [
        &["put", "acme", "https://acme.example"] as &[&str],
        &["list", "--search", "acme"],
        &["show", "acme"],
        &["show", "acme", "--reveal"],
        &["rotate", "acme"],
        &["disable", "acme"],
        &["enable", "acme"],
        &["remove", "acme", "--yes"],
    ] {
        let done = finish(ground.command(&[&["endpoint"], arguments].concat()));
        assert_eq!(ground.calls(), 0, "by {arguments:?}: {}", done.stderr);
        done.code(0);
    }
}

/// The functions of the migrations call nothing foreign, and still find the caller's schema.
fn outbox_is_made_and_dropped(ground: &Ground, conn: &mut PgConnection) {
    conn.batch_execute("CREATE SCHEMA hrm; SET search_path = hrm, public, pg_catalog")
        .expect("a schema");
    let text = |name: &str| format!("SELECT public.{name}('events'::pg_catalog.text)");
    for function in ["outbox_create", "outbox_create_endpoints"] {
        diesel::sql_query(text(function))
            .execute(conn)
            .expect("made");
    }
    let there = "SELECT count(*) FROM pg_class WHERE relnamespace = 'hrm'::regnamespace AND relname = 'events'";
    assert_eq!(ground.count(there), 1);
    assert_eq!(path_of(conn), "hrm, public, pg_catalog");
    diesel::sql_query("INSERT INTO hrm.events (topic, payload) VALUES ('a', '1')")
        .execute(conn)
        .expect("inserted");
    diesel::sql_query(text("outbox_drop"))
        .execute(conn)
        .expect("dropped");
    assert_eq!(ground.count(there), 0);
    assert_eq!(ground.calls(), 0, "by the functions");
}

//! What is changed on the pages.

use super::*;

/// The form fields that choose these dead letters.
fn chosen(database: &Database, sequences: &[i64]) -> String {
    let field = |sequence: &i64| {
        let id = database.text(&format!(
            "SELECT coalesce((SELECT message_id FROM {{o}}_dead WHERE sequence = {sequence}), gen_random_uuid())"
        ));
        format!("letter={sequence}.{}", id.expect("an id"))
    };
    sequences.iter().map(field).collect::<Vec<_>>().join("&")
}

/// R25
#[test]
fn chosen_dead_letters_are_requeued_and_the_others_stay() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 5);
    let page = open(&database);
    let answer = send(
        &page,
        "/dead/requeue",
        &format!("topic=order.paid&{}", chosen(&database, &[2, 4, 99])),
    );
    assert_eq!(answer.status, 303);
    let next = answer.header("location").expect("a redirect");
    assert_eq!(next, "/dead?topic=order.paid&done=requeued&count=2");
    assert!(page.get(next).body.contains("2 dead letters were requeued"));
    assert_eq!(database.number("SELECT sum(sequence) FROM {o}"), 6);
    assert_eq!(count_dead(&database), 3);

    let again = send(&page, "/dead/requeue", &chosen(&database, &[2]));
    let next = again.header("location").expect("a redirect");
    assert!(page.get(next).body.contains("Nothing was requeued"));
    assert_eq!(send(&page, "/dead/requeue", "letter=x").status, 400);
    let none = send(&page, "/dead/requeue", "topic=order.paid");
    assert_eq!(
        none.header("location"),
        Some("/dead?topic=order.paid&done=nothing")
    );

    let line = page.process.log();
    let line = line
        .lines()
        .find(|line| line.contains("admin_requeue"))
        .expect("an audit line");
    let line: serde_json::Value = serde_json::from_str(line).expect("JSON");
    assert_eq!(line["target"], "diesel_outbox::audit");
    assert_eq!(
        (&line["who"], &line["peer"]),
        (&json!("local"), &json!("127.0.0.1"))
    );
    assert_eq!((&line["matched"], &line["changed"]), (&json!(2), &json!(2)));
    let what = line["what"].as_str().unwrap_or_default();
    assert!(what.starts_with("2."), "{what}");
}

#[test]
fn nothing_is_discarded_before_somebody_has_said_yes_to_how_much() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 60);
    bury(&database, "order.shipped", 101, 7);
    let page = open(&database);

    let one = send(&page, "/dead/discard", &chosen(&database, &[101]));
    assert_eq!(one.status, 200);
    assert!(one.body.contains("Discard 1 dead letter?"), "{}", one.body);
    let all = send(&page, "/dead/discard", "all=yes&topic=order.paid");
    assert!(
        all.body.contains("Discard 60 dead letters?"),
        "{}",
        all.body
    );
    assert!(all.body.contains("topic order.paid"));
    let requeue = send(&page, "/dead/requeue", "all=yes&topic=order.paid");
    assert!(requeue.body.contains("Requeue 60 dead letters?"));
    let (_, before) = all
        .body
        .split_once("name=\"counted_at\" value=\"")
        .expect("a hidden field");
    let (before, _) = before.split_once('"').expect("a time");
    // Meanwhile one dead letter is gone and others are new. One of the new ones was not part of the question, and one
    // was recorded late.
    database.execute("DELETE FROM {o}_dead WHERE sequence = 60");
    bury(&database, "order.paid", 0, 1);
    database.execute("UPDATE {o}_dead SET dead_lettered_at = now() WHERE sequence = 0");
    let yes = format!("all=yes&topic=order.paid&counted_at={before}&sure");
    bury(&database, "order.paid", 61, 2);
    let more = send(&page, "/dead/discard", &format!("{yes}=60"));
    assert_eq!(more.status, 200);
    assert!(more.body.contains("Discard 61 dead letters?") && more.body.contains("More match"));
    assert_eq!(count_dead(&database), 69);

    let done = send(&page, "/dead/discard", &format!("{yes}=61"));
    assert_eq!(
        done.header("location"),
        Some("/dead?topic=order.paid&done=discarded&count=61")
    );
    assert_eq!(
        database
            .number("SELECT count(*) FROM {o}_dead WHERE topic = 'order.paid' AND sequence = 0"),
        1,
        "a dead letter that was not part of the question is kept"
    );
    assert_eq!(count_dead(&database), 8);
    page.process.wait_for_log("\"what\":\"topic order.paid\"");
    let done = send(&page, "/dead/requeue", "all=yes&q=order.shipped-103&sure=1");
    assert_eq!(
        done.header("location"),
        Some("/dead?q=order.shipped-103&done=requeued&count=1")
    );
    assert_eq!(database.number("SELECT sequence FROM {o}"), 103);
}

#[test]
fn a_topic_is_paused_and_resumed_and_what_cannot_be_is_said() {
    let database = Database::new();
    let page = open(&database);
    for fields in [
        "kind=outbox&name=x",
        "kind=topic",
        "kind=topic&name=%20",
        "kind=topic&name=a&for=soon",
        "kind=topic&name=a&for=900000y",
        "kind=destination&name=a&reason=BREAKER_OPEN",
    ] {
        let answer = post_overview(&page, "/pause", fields);
        assert_eq!(answer.status, 400, "{fields}");
    }
    let pause = "kind=topic&name=order.paid&reason=%3Cb%3Ethey+sleep%3C%2Fb%3E&for=1h";
    assert_eq!(
        post_overview(&page, "/pause", pause).header("location"),
        Some("/?done=paused")
    );
    let body = page.get("/").body;
    assert!(
        body.contains("&lt;b&gt;they sleep&lt;/b&gt;") && !body.contains("<b>"),
        "{body}"
    );
    let resume = "kind=topic&name=order.paid";
    for count in [1, 0] {
        let next = format!("/?done=resumed&count={count}");
        assert_eq!(
            post_overview(&page, "/resume", resume).header("location"),
            Some(next.as_str())
        );
    }
    for event in ["admin_pause", "admin_resume"] {
        page.process.wait_for_log(&format!("\"{event}\""));
    }
}

/// R60: the list of acts is read to its end.
#[test]
fn older_acts_are_on_further_pages_and_a_test_of_a_destination_is_an_act() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let acme = Endpoint::new("acme", receiver.url());
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    outbox.endpoints().put(conn, &acme).expect("put");
    database.execute(
        "INSERT INTO {o}_audit (at, who, act, target, why)
         SELECT now() - n * interval '1 min', 'ann', 'pause', 'topic-' || n, '' FROM generate_series(1, 250) n",
    );
    let mut command = database.binary(&["admin"]);
    command.env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false");
    command.env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
    let page = Page::start(command);
    let tested = post_overview(&page, "/endpoint/test", "name=acme");
    assert!(tested.body.contains("succeeded"), "{tested:?}");
    let first = page.get("/audit").body;
    assert!(first.contains("<code>endpoint test</code>"), "{first}");
    assert!(first.contains("topic-199") && !first.contains("topic-200"));
    let (_, rest) = first
        .split_once("<a class=\"button second\" href=\"")
        .expect("older ones");
    let next = rest.split('"').next().expect("a link");
    let second = page.get(next).body;
    assert!(
        second.contains("topic-250") && !second.contains("topic-199"),
        "{second}"
    );
    assert_eq!(page.get("/audit?before=x").status, 400);
}

/// R46
#[test]
fn endpoints_are_searched_shown_and_changed() {
    let database = Database::new();
    let receiver = Receiver::ok();
    let outbox = database.outbox();
    let hook = format!("{}/services/T0/B0", receiver.url());
    let acme = Endpoint::new("acme", hook)
        .topics(["order.*"])
        .header("x-key", "hunter2");
    let conn = &mut database.connect();
    outbox.endpoints().put(conn, &acme).expect("put");
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, description, enabled)
         SELECT 'd' || n, 'https://customer.example/' || n, '100%_' || n || '<b>', n % 2 = 0
           FROM generate_series(10001, 20000) n",
    );
    let environment = [
        ("OUTBOX_ENDPOINT_HTTPS_ONLY", "false"),
        ("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false"),
    ];
    let mut command = database.binary(&["admin"]);
    command.envs(environment);
    let page = Page::start(command);
    let rows = |path: &str| {
        let answer = page.get(path);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.body.matches("/endpoints?name=").count()
    };
    assert_eq!(rows("/endpoints"), 50);
    assert_eq!(rows("/endpoints?after=d19990"), 10);
    assert_eq!(rows("/endpoints?q=EXAMPLE%2F1234&state=active"), 5);
    assert_eq!(
        rows("/endpoints?q=100%25_12345"),
        1,
        "a wildcard is taken literally"
    );
    assert_eq!(rows("/endpoints?q=100__12345"), 0);
    assert_eq!(page.get("/endpoints?state=odd").status, 400);
    assert_eq!(page.get("/endpoints?name=nobody").status, 404);
    let body = page.get("/endpoints?q=d12345").body;
    assert!(
        body.contains("&lt;b&gt;") && !body.contains("<b>"),
        "{body}"
    );

    // One message that was dead-lettered at this destination, and one that it got.
    let message = |table: &str, columns: &str, values: &str| {
        database.execute(&format!(
            "INSERT INTO {{o}}{table} (sequence, message_id, topic, destination, idempotency_key, created_at, {columns})
             VALUES (1, '0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c', 'order.paid', 'acme', 'k', now(), {values})"
        ));
    };
    message(
        "_dead",
        "payload, available_at, attempts, reason, last_error",
        "'{}', now(), 3, 'REJECTED', 'the receiver returned 422'",
    );
    database.execute(
        "INSERT INTO {o}_ledger (part, sequence, message_id, topic, destination, named_destination,
                status, attempts, created_at, settled_at)
         SELECT 0, 100 + n, gen_random_uuid(), 'order.paid', 'acme', '', 'delivered', 1, now(), now()
           FROM generate_series(1, 37) n",
    );
    let one = "/endpoints?name=acme";
    let body = page.get(one).body;
    assert!(
        body.contains("37") && body.contains("Delivered messages, last hour"),
        "{body}"
    );
    for shown in ["order.*", "x-key", "REJECTED", "Send again", "active"] {
        assert!(body.contains(shown), "{shown}: {body}");
    }
    let secret = outbox.endpoints().secret(conn, "acme").expect("read");
    let secret = secret.expect("one").written().expose_secret().to_owned();
    for hidden in ["hunter2", "T0/B0", &secret] {
        assert!(!body.contains(hidden), "{hidden}");
    }

    let change = |what: &str, fields: &str| {
        let (path, fields) = (format!("/endpoint/{what}"), format!("name=acme&{fields}"));
        post_overview(&page, &path, &fields)
    };
    let leads = |answer: &Answer| answer.header("location").map(str::to_owned);
    let done = change("disable", "reason=they+asked");
    assert_eq!(leads(&done), Some(format!("{one}&done=disabled")));
    let body = page.get(&format!("{one}&done=disabled")).body;
    assert!(body.contains("they asked"), "{body}");
    assert!(body.contains("Disabled. New messages are not for the endpoint"));
    let tested = change("test", "");
    assert!(tested.body.contains("succeeded"), "{tested:?}");
    assert_eq!(receiver.count(), 1);
    let done = change("enable", "");
    assert_eq!(leads(&done), Some(format!("{one}&done=enabled")));
    assert_eq!(change("send-again", "message=1").status, 400);
    let done = change("send-again", "message=0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c");
    assert_eq!(leads(&done), Some(format!("{one}&done=sent_again")));
    assert_eq!(database.count("pending"), 1);
    let asked = change("remove", "").body;
    assert!(
        asked.contains("No, go back") && asked.contains("1 message waits"),
        "{asked}"
    );
    let done = change("remove", "sure=yes");
    assert_eq!(leads(&done), Some("/endpoints?done=removed".to_owned()));
    let body = page.get("/endpoints?done=removed").body;
    assert!(
        body.contains("are not sent, and end in the ledger"),
        "{body}"
    );
    let done = change("enable", "");
    assert_eq!(leads(&done), Some(format!("{one}&done=no_endpoint")));
    page.process.wait_for_log("\"admin_endpoint\"");
}

/// R30. A login name with a space, an equals sign or a line end stays one value.
#[test]
fn no_name_and_no_duration_forges_a_line_of_the_audit_log() {
    let database = Database::new();
    let forger = "x who=root event=admin_resume";
    let act = |page: &Page| {
        let name = forger.replace(' ', "+").replace('=', "%3D") + "%0AT%1B";
        let login = page.post("/login", "", &format!("token={TOKEN}&name={name}"));
        let cookie = login.cookie();
        let overview = page.request("GET /", &[&format!("cookie: {cookie}")], "");
        let token = overview.form_token();
        let fields = format!("form_token={token}&kind=topic&name={name}&reason={name}&for=1h");
        assert_eq!(page.post("/pause", cookie, &fields).status, 303);
        page.process.wait_for_log("admin_pause");
    };
    let admin = || {
        let command = database.binary(&["admin"]);
        command.with("OUTBOX_ADMIN_TOKEN", TOKEN)
    };
    let page = Page::start(admin());
    act(&page);
    let log = page.process.log();
    let lines = log.lines().map(|line| {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let time = line["time"].as_str().expect("a time");
        assert!(time.starts_with("20") && time.ends_with('Z'), "{line}");
        line
    });
    let pause = lines
        .filter(|line| line["event"] == "admin_pause")
        .collect::<Vec<_>>();
    let [pause] = pause.as_slice() else {
        panic!("not exactly one line: {log}");
    };
    assert_eq!(pause["how_long"], "1h");
    assert!(pause["who"].as_str().expect("a name").starts_with(forger));

    let command = admin()
        .with("OUTBOX_ADMIN_ADDR", "127.0.0.1:0")
        .with("OUTBOX_LOG_FORMAT", "text");
    let page = Page::of(Running::start(command));
    act(&page);
    let log = page.process.log();
    for line in log.lines() {
        assert!(line.starts_with("20"), "{line}");
    }
    // Every second piece is quoted.
    let line = log.lines().find(|line| line.contains("event=admin_pause"));
    let line = line.expect("a line").replace("\\\"", "");
    let outside: String = line.split('"').step_by(2).collect();
    assert!(!outside.contains("root"), "{outside}: {line}");
    assert_eq!(outside.matches("event=").count(), 1, "{outside}: {line}");
    assert_eq!(outside.matches("who=").count(), 1, "{outside}: {line}");
}

fn post_overview(page: &Page, path: &str, fields: &str) -> Answer {
    let token = page.get("/").form_token();
    page.post(path, "", &format!("form_token={token}&{fields}"))
}

#[test]
fn the_audit_log_is_text_where_logs_are() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1);
    let command = database
        .binary(&["admin"])
        .with("OUTBOX_ADMIN_ADDR", "127.0.0.1:0");
    let page = Page::of(Running::start(command));
    let one = chosen(&database, &[1]);
    send(&page, "/dead/discard", &format!("{one}&sure=1"));
    page.process.wait_for_log("event=admin_discard");
    let log = page.process.log();
    let line = log
        .lines()
        .find(|line| line.contains("admin_discard"))
        .expect("a line");
    for part in ["who=local", "peer=127.0.0.1", "what=1.", "changed=1"] {
        assert!(line.contains(part), "{part}: {line}");
    }
}

#[test]
fn a_change_that_is_broken_off_says_how_far_it_came() {
    let database = Database::new();
    bury(&database, "order.paid", 1, 1500);
    let schema = database.schema().to_owned();
    database.execute(&format!(
        "CREATE FUNCTION {schema}.refuse() RETURNS trigger LANGUAGE plpgsql AS
         $$ BEGIN RAISE EXCEPTION 'not this one'; END $$"
    ));
    database.execute(&format!(
        "CREATE TRIGGER refuse BEFORE INSERT ON {{o}} FOR EACH ROW
         WHEN (NEW.sequence = 1200) EXECUTE FUNCTION {schema}.refuse()"
    ));
    let page = open(&database);
    let answer = send(&page, "/dead/requeue", "all=true&sure=1500");
    assert_eq!(answer.status, 503, "{answer:?}");
    assert!(answer.body.contains("not this one"), "{}", answer.body);
    assert!(
        answer.body.contains("1,000 were requeued before the error"),
        "{}",
        answer.body
    );
    let requeued = database.number("SELECT count(*) FROM {o}");
    assert_eq!((requeued, count_dead(&database)), (1000, 500));
    page.process
        .wait_for_log("1000 of 1500 dead letters requeued, then failed");
    assert!(
        page.process.log().contains("\"changed\":1000"),
        "{}",
        page.process.log()
    );
}

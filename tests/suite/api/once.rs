//! Requests with an idempotency key.

use super::*;

/// R60: over every act of both tables.
#[test]
fn a_key_of_another_request_is_refused_as_documented() {
    let (database, acme, _) = two();
    let (pages, portal) = (pages(&database), portal(&database));
    let token = portal.token(acme.id, HOUR, Rights::all());
    let before = crate::tenants::rows_of(&database, &acme);
    for (program, caller) in [
        (Program::new(&pages, TOKEN), "operator token".to_owned()),
        (Program::new(&portal, &token), format!("tenant {}", acme.id)),
    ] {
        database.execute(&format!(
            "INSERT INTO {{o}}_request (caller, key, digest, status, answer) VALUES ('{caller}', '1', '', 200, '{{}}')"
        ));
        for (method, path) in program.routes("acme-hook") {
            if method == Method::GET {
                continue;
            }
            let response = program.respond(&method, &path, Some(json!({})), Some("1"));
            let (status, answer) = read(&response);
            program.fits(&method, &path, status, &answer);
            assert_eq!(status, 422, "{method} {path}: {answer}");
            assert_eq!(answer["field"], "idempotency-key");
        }
    }
    assert_eq!(crate::tenants::rows_of(&database, &acme), before);
}

/// R60
#[test]
fn a_request_with_an_idempotency_key_acts_once_and_has_the_same_answer_for_a_day() {
    let (database, receiver) = (Database::new(), receiver());
    let (pages, portal) = (pages(&database), portal(&database));
    let (acme, globex) = (Uuid::now_v7(), Uuid::now_v7());
    let of = |tenant| Program::new(&portal, &portal.token(tenant, HOUR, Rights::all()));
    let (operator, acme, globex) = (Program::new(&pages, TOKEN), of(acme), of(globex));
    let endpoints = || database.number("SELECT count(*) FROM {o}_endpoint");

    let body = json!({ "url": receiver.url(), "topics": ["order.paid"] });
    let (status, mut first, is_replayed) = acme.keyed("/endpoints", &body, "1");
    assert_eq!((status, is_replayed), (201, false), "{first}");
    let secret = first["secret"].take();
    let secret = secret.as_str().expect("a secret");
    assert!(secret.starts_with("whsec_"), "{secret}");
    assert_eq!(
        acme.keyed("/endpoints", &body, "1"),
        (201, first.clone(), true)
    );
    // The key is a string of structured headers, too.
    assert_eq!(
        acme.keyed("/endpoints", &body, "\"1\""),
        (201, first.clone(), true)
    );
    let stored = database.text("SELECT string_agg(r::text, '') FROM {o}_request r");
    let stored = stored.expect("a request");
    assert!(
        !stored.contains(secret) && !stored.contains("whsec_"),
        "{stored}"
    );
    assert_eq!(endpoints(), 1);

    // Another request with the same key, and keys that are none.
    let other = json!({ "url": receiver.url(), "topics": ["order.paid"], "description": "other" });
    let (status, problem, _) = acme.keyed("/endpoints", &other, "1");
    assert_eq!(
        (status, &problem["field"]),
        (422, &json!("idempotency-key"))
    );
    for bad in ["", "\"\"", &"x".repeat(256)] {
        let (status, problem, _) = acme.keyed("/endpoints", &body, bad);
        assert_eq!(
            (status, &problem["field"]),
            (400, &json!("idempotency-key"))
        );
    }
    assert_eq!(endpoints(), 1);

    // The keys of another tenant, and of operators, are others: nobody gets the answer to another's request.
    let (status, theirs, is_replayed) = globex.keyed("/endpoints", &body, "1");
    assert_eq!((status, is_replayed), (201, false), "{theirs}");
    assert_ne!(theirs["endpoint"]["name"], first["endpoint"]["name"]);
    let hook = json!({ "name": "hook", "endpoint": body });
    let (status, _, is_replayed) = operator.keyed("/endpoints", &hook, "1");
    assert_eq!((status, is_replayed), (201, false));
    assert_eq!(endpoints(), 3);

    // With fewer rights, the answer of more rights is not shown.
    let few = Rights::look().with_act(true);
    let few = Program::new(&portal, &portal.token(Uuid::nil(), HOUR, few));
    let all = Program::new(&portal, &portal.token(Uuid::nil(), HOUR, Rights::all()));
    assert_eq!(all.keyed("/endpoints", &body, "1").0, 201);
    assert_eq!(few.keyed("/endpoints", &body, "1").0, 422);

    // A refusal has not acted, and is not kept.
    let wrong = json!({ "url": "acme.example", "topics": ["order.paid"] });
    assert_eq!(acme.keyed("/endpoints", &wrong, "2").0, 422);
    assert_eq!(acme.keyed("/endpoints", &body, "2").0, 201);

    // A new secret is not made twice, and a test is not sent twice.
    let (_, rotated, _) = operator.keyed("/endpoints/hook/rotate", &json!({}), "3");
    assert!(rotated["secret"].is_string(), "{rotated}");
    let again = operator.keyed("/endpoints/hook/rotate", &json!({}), "3");
    assert_eq!(again, (200, json!({ "secret": null }), true));
    let sent = receiver.count();
    let tested = operator.keyed("/endpoints/hook/test", &json!({}), "4");
    let again = operator.keyed("/endpoints/hook/test", &json!({}), "4");
    assert_eq!((tested.0, &tested.1, true), (again.0, &again.1, again.2));
    assert_eq!(receiver.count(), sent + 1);
    // The process that sent it has ended before the answer.
    database.execute("UPDATE {o}_request SET status = NULL, answer = NULL WHERE key = '4'");
    assert_eq!(
        operator.keyed("/endpoints/hook/test", &json!({}), "4").0,
        409
    );
    assert_eq!(receiver.count(), sent + 1);
    // No send takes so long.
    database.execute("UPDATE {o}_request SET at = now() - interval '15 minutes' WHERE key = '4'");
    let (status, _, is_replayed) = operator.keyed("/endpoints/hook/test", &json!({}), "4");
    assert_eq!((status, is_replayed), (200, false));
    assert_eq!(receiver.count(), sent + 2);

    // After a day, the key is free again.
    database.execute("UPDATE {o}_request SET at = now() - interval '24 hours'");
    let (status, _, is_replayed) = acme.keyed("/endpoints", &body, "1");
    assert_eq!((status, is_replayed), (201, false));
    let turn = "SELECT emptied FROM {o}_rotate(interval '30 days')";
    // The first turn opens the ledger.
    assert_eq!((database.number(turn), database.number(turn)), (0, 0));
    assert_eq!(database.number("SELECT count(*) FROM {o}_request"), 1);
}

/// R60: two processes, and the same request at the same time.
#[test]
fn the_same_request_of_two_processes_at_once_acts_once() {
    let (database, receiver) = (Database::new(), receiver());
    let tenant = Uuid::now_v7();
    let portals = [portal(&database), portal(&database)];
    let programs = portals
        .each_ref()
        .map(|portal| Program::new(portal, &portal.token(tenant, HOUR, Rights::all())));
    let body = json!({ "url": receiver.url(), "topics": ["order.paid"] });
    for key in ["1", "2", "3", "4", "5"] {
        let barrier = Barrier::new(2);
        let answers = thread::scope(|scope| {
            let sent = programs.each_ref().map(|program| {
                scope.spawn(|| {
                    barrier.wait();
                    program.keyed("/endpoints", &body, key)
                })
            });
            sent.map(|one| one.join().expect("answered"))
        });
        let acted = answers
            .iter()
            .filter(|(status, _, replayed)| *status == 201 && !replayed);
        assert_eq!(acted.count(), 1, "{answers:?}");
        for (status, answer, replayed) in &answers {
            assert!(*status == 409 || *status == 201, "{answer} {replayed}");
        }
        let (status, _, is_replayed) = programs[0].keyed("/endpoints", &body, key);
        assert_eq!((status, is_replayed), (201, true));
    }
    assert_eq!(database.number("SELECT count(*) FROM {o}_endpoint"), 5);
}

/// R60: what a request has done and its answer are one transaction.
#[test]
fn an_act_whose_answer_cannot_be_kept_is_undone() {
    let (database, receiver) = (Database::new(), receiver());
    let pages = pages(&database);
    let program = Program::new(&pages, TOKEN);
    let body = json!({ "name": "hook", "endpoint": { "url": receiver.url() } });
    database.execute("ALTER TABLE {o}_request ADD CONSTRAINT fits CHECK (status IS NULL)");
    let (status, problem, _) = program.keyed("/endpoints", &body, "1");
    assert_eq!(status, 503, "{problem}");
    assert_eq!(program.ask(&Method::GET, "/endpoints/hook", None).0, 404);
    assert_eq!(database.number("SELECT count(*) FROM {o}_audit"), 0);
    database.execute("ALTER TABLE {o}_request DROP CONSTRAINT fits");
    let (status, answer, is_replayed) = program.keyed("/endpoints", &body, "1");
    assert_eq!((status, is_replayed), (201, false), "{answer}");

    // A test that was sent stays sent: the program gets the result, and its key is taken for some minutes.
    database
        .execute("ALTER TABLE {o}_request ADD CONSTRAINT fits CHECK (status IS NULL) NOT VALID");
    let (status, tested, _) = program.keyed("/endpoints/hook/test", &json!({}), "2");
    assert_eq!(
        (status, &tested["accepted"]),
        (200, &json!(true)),
        "{tested}"
    );
    assert_eq!(
        program.keyed("/endpoints/hook/test", &json!({}), "2").0,
        409
    );
    assert_eq!(receiver.count(), 1);
}

/// R60
#[test]
fn an_act_that_was_undone_has_no_line_in_the_audit_log() {
    let database = Database::new();
    let page = Page::start(
        database
            .binary(&["admin"])
            .with("OUTBOX_ADMIN_TOKEN", TOKEN),
    );
    let bearer = format!("authorization: Bearer {TOKEN}");
    let register = |name: &str| {
        let body = json!({ "name": name, "endpoint": { "url": "https://acme.example/" } });
        let headers = [
            bearer.as_str(),
            "content-type: application/json",
            "idempotency-key: 1",
        ];
        let answer = page.request("POST /api/v1/endpoints", &headers, &body.to_string());
        answer.status
    };
    database.execute("ALTER TABLE {o}_request ADD CONSTRAINT fits CHECK (status IS NULL)");
    assert_eq!(register("undone"), 503);
    database.execute("ALTER TABLE {o}_request DROP CONSTRAINT fits");
    assert_eq!(register("done"), 201);
    page.process.wait_for_log("admin_endpoint");
    let log = page.process.log();
    let acts: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("admin_endpoint"))
        .collect();
    assert!(acts.len() == 1 && !acts[0].contains("undone"), "{log}");
}

/// R60: with connections that the application lends.
#[test]
fn a_request_acts_once_with_borrowed_connections_too() {
    let (database, receiver) = (Arc::new(Database::new()), receiver());
    let lent = Arc::clone(&database);
    let get = move || Ok::<_, String>(Box::new(lent.connect()));
    let pages = Pages::operators(&config(&database), get, None).expect("pages");
    let visitor = || Visitor::known("ann", Rights::all());
    let body = json!({ "name": "hook", "endpoint": { "url": receiver.url() } }).to_string();
    let send = || {
        let request = Request::post("/api/v1/endpoints")
            .header("host", "localhost")
            .header("content-type", "application/json")
            .header("idempotency-key", "1")
            .body(body.clone().into_bytes());
        pages.respond(request.expect("a request"), visitor())
    };
    let (first, second) = (send(), send());
    let (status, mut answer) = read(&first);
    assert_eq!(status, 201, "{answer}");
    answer["secret"] = Value::Null;
    assert_eq!(read(&second), (status, answer));
    assert_eq!(second.headers()["idempotency-replayed"], "true");
    // The act and its answer are one transaction there, too.
    database.execute("DELETE FROM {o}_request");
    database.execute("DELETE FROM {o}_endpoint");
    database.execute("ALTER TABLE {o}_request ADD CONSTRAINT fits CHECK (status IS NULL)");
    assert_eq!(read(&send()).0, 503);
    assert_eq!(database.number("SELECT count(*) FROM {o}_endpoint"), 0);
    assert_eq!(database.number("SELECT count(*) FROM {o}_request"), 0);
}

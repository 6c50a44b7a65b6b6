//! How much a tenant may do in the portal, and what it costs the others.

use super::*;

/// R60: on pages and as JSON, in all processes together.
#[test]
fn a_tenant_sends_at_most_ten_examples_and_verifications_in_a_minute() {
    let (database, acme, globex) = two();
    let portals = [portal(&config(&database)), portal(&config(&database))];
    let test = |portal: &Portal, tenant: &Tenant| {
        let browser = Browser::of(portal, tenant, Rights::all());
        let form = [("name", tenant.endpoint.as_str()), ("topic", "")];
        browser.post("/endpoint/test", &form).status
    };
    let as_json = |act: &str| {
        let path = format!("/api/v1/endpoints/{}/{act}", acme.endpoint);
        let request = http::Request::post(path).header("host", "shop.example");
        let request = request.header("content-type", "application/json");
        let visitor = Visitor::of_tenant(acme.id, "ann", Rights::all());
        portals[0].respond(request.body(b"{}".to_vec()).expect("a request"), visitor)
    };
    let sent = acme.receiver.count();
    assert_eq!(as_json("test").status(), StatusCode::OK);
    let answers: Vec<StatusCode> = std::thread::scope(|scope| {
        let sent: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| test(&portals[1], &acme)))
            .collect();
        sent.into_iter()
            .map(|one| one.join().expect("answered"))
            .collect()
    });
    let done = answers.iter().filter(|status| **status == StatusCode::OK);
    assert_eq!(done.count(), 9, "{answers:?}");
    let limited = answers
        .iter()
        .filter(|status| **status == StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(limited.count(), 7, "{answers:?}");
    assert_eq!(acme.receiver.count(), sent + 10);
    for act in ["test", "verify"] {
        let refused = as_json(act);
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(refused.headers()["retry-after"], "60");
    }
    assert_eq!(test(&portals[0], &globex), StatusCode::OK, "another tenant");
    // An endpoint that is registered again is one of the same tenant.
    database.execute("DELETE FROM {o}_endpoint WHERE name = 'acme-hook'");
    acme.put(&database);
    assert_eq!(test(&portals[0], &acme), StatusCode::TOO_MANY_REQUESTS);
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute'");
    assert_eq!(test(&portals[0], &acme), StatusCode::OK);
}

/// R60: changes, messages and requests count against one budget, in pages and JSON: a loop of adding, recovering and
/// removing ends soon, and delays nobody else.
#[test]
fn every_act_of_a_customer_counts_against_the_budget_of_the_tenant() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let change = |tenant: &Tenant, act: &str| {
        let form = [("name", tenant.endpoint.as_str())];
        let browser = Browser::of(&portal, tenant, Rights::all());
        browser.post(&format!("/endpoint/{act}"), &form).status
    };
    let mut changes = 0;
    while change(&acme, ["disable", "enable"][changes % 2]) == StatusCode::SEE_OTHER {
        changes += 1;
        assert!(changes <= 60, "no budget");
    }
    // A disable costs 1, an enable 6: what has begun may overspend.
    assert_eq!(changes, 18);
    for act in ["rotate", "disable", "recover", "verify", "test"] {
        let form = [
            ("name", acme.endpoint.as_str()),
            ("since", "2026-01-01T00:00"),
            ("missing", "on"),
        ];
        let browser = Browser::of(&portal, &acme, Rights::all());
        let refused = browser.post(&format!("/endpoint/{act}"), &form);
        assert_eq!(refused.status, StatusCode::TOO_MANY_REQUESTS, "{act}");
    }
    assert_eq!(change(&globex, "disable"), StatusCode::SEE_OTHER);
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute'");
    assert_eq!(change(&acme, "disable"), StatusCode::SEE_OTHER);
    // An hour has a budget, too.
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute', cost = 3600");
    assert_eq!(change(&acme, "enable"), StatusCode::TOO_MANY_REQUESTS);
}

/// R60: the cost of a recovery is known at its end, so recoveries that run together would all begin with the same budget.
#[test]
fn recoveries_of_one_tenant_do_not_run_together() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let recover = |tenant: &Tenant, act: &str| {
        let form = [
            ("name", tenant.endpoint.as_str()),
            ("since", "2026-01-01T00:00"),
        ];
        let browser = Browser::of(&portal, tenant, Rights::all());
        browser.post(&format!("/endpoint/{act}"), &form).status
    };
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!("BEGIN; LOCK TABLE {name}_dead"))
        .expect("a lock");
    let waiting = || {
        database.number(
            "SELECT count(*) FROM pg_locks WHERE relation = '{o}_dead'::regclass AND NOT granted",
        )
    };
    std::thread::scope(|threads| {
        let first = threads.spawn(|| recover(&acme, "recover"));
        eventually("the first recovery makes messages", || waiting() == 1);
        assert_eq!(recover(&acme, "retry"), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(
            recover(&acme, "disable"),
            StatusCode::SEE_OTHER,
            "not held up"
        );
        assert_eq!(
            recover(&globex, "retry"),
            StatusCode::SEE_OTHER,
            "of another tenant"
        );
        other.batch_execute("COMMIT").expect("unlocked");
        assert_eq!(first.join().expect("an answer"), StatusCode::SEE_OTHER);
    });
    assert_eq!(recover(&acme, "retry"), StatusCode::SEE_OTHER);
}

/// A request of the tenant's program to recover the endpoint.
fn recovery(
    portal: &Portal,
    tenant: &Tenant,
    body: &Value,
    key: Option<&str>,
) -> (StatusCode, Value) {
    let path = format!("/api/v1/endpoints/{}/recover", tenant.endpoint);
    let request = http::Request::post(path).header("host", "shop.example");
    let mut request = request.header("content-type", "application/json");
    if let Some(key) = key {
        request = request.header("idempotency-key", key);
    }
    let visitor = Visitor::of_tenant(tenant.id, "ann", Rights::all());
    let request = request.body(body.to_string().into_bytes());
    let answer = portal.respond(request.expect("a request"), visitor);
    let body = serde_json::from_slice(answer.body()).expect("JSON");
    (answer.status(), body)
}

/// R60: a count, and a recovery that finds nothing, cost the database as much as one that finds messages; each key of a
/// request is a row.
#[test]
fn a_search_that_finds_nothing_counts_against_the_budget_of_the_tenant() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let body = |dry_run| json!({ "since": "1h", "missing": true, "dry_run": dry_run });
    for dry_run in [true, false] {
        let mut answers = (0..=60).map(|number: usize| {
            let key = format!("{dry_run} {number}");
            recovery(&portal, &acme, &body(dry_run), Some(&key)).0
        });
        let refused = answers.position(|status| status == StatusCode::TOO_MANY_REQUESTS);
        assert!(
            (1..=60).contains(&refused.expect("no budget")),
            "{refused:?}"
        );
        let (status, answer) = recovery(&portal, &globex, &body(dry_run), None);
        assert_eq!(status, StatusCode::OK, "another tenant: {answer}");
        database.execute("UPDATE {o}_audit SET at = at - interval '1 minute'");
    }
    assert!(database.number("SELECT count(*) FROM {o}_request") <= 120);
    let counted = "SELECT count(*) FROM {o}_audit WHERE why = 'portal, dry run' AND cost > 0";
    assert!(database.number(counted) > 0);
}

/// R60: counting ends after some seconds, and all tenants together leave connections to those who change something.
#[test]
fn counts_of_customers_end_and_hold_up_no_change() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!("BEGIN; LOCK TABLE {name}_ledger"))
        .expect("a lock");
    let waiting = || {
        database.number(
            "SELECT count(*) FROM pg_locks WHERE relation = '{o}_ledger'::regclass AND NOT granted",
        )
    };
    let body = json!({ "since": "1h", "missing": true, "dry_run": true });
    let answers: Vec<(StatusCode, Value)> = std::thread::scope(|threads| {
        let counting: Vec<_> = [&acme, &globex, &acme, &globex, &acme, &globex]
            .map(|tenant| threads.spawn(|| recovery(&portal, tenant, &body, None)))
            .into_iter()
            .collect();
        eventually("two tenants count", || waiting() >= 2);
        for tenant in [&acme, &globex] {
            let browser = Browser::of(&portal, tenant, Rights::all());
            let form = [("name", tenant.endpoint.as_str())];
            let paused = browser.post("/endpoint/pause", &form).status;
            assert_eq!(paused, StatusCode::SEE_OTHER);
        }
        let counted = counting
            .into_iter()
            .map(|one| one.join().expect("no panic"));
        counted.collect()
    });
    // One that fails has a cost, too.
    database.execute("UPDATE {o}_audit SET at = at - interval '1 minute', cost = 0");
    let body = json!({ "since": "1h", "missing": true });
    let (status, answer) = recovery(&portal, &acme, &body, None);
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "{answer}");
    assert!(database.number("SELECT sum(cost)::bigint FROM {o}_audit") >= 50);
    other.batch_execute("COMMIT").expect("unlocked");
    for (status, answer) in &answers {
        let is_cut = *status == StatusCode::OK && answer["more"] == true;
        let is_refused = *status == StatusCode::TOO_MANY_REQUESTS;
        let has_no_turn = *status == StatusCode::SERVICE_UNAVAILABLE;
        assert!(is_cut || is_refused || has_no_turn, "{answers:?}");
    }
    assert!(answers.iter().any(|(status, _)| *status == StatusCode::OK));
}

/// R60: the pages of a tenant that wait for the database leave connections to other tenants.
#[test]
fn slow_pages_of_one_tenant_delay_no_other() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let page = format!(
        "/delivery?{}",
        encoded(&[("name", &acme.endpoint), ("id", &acme.dead.to_string())])
    );
    let (mut other, name) = (database.connect(), database.name());
    other
        .batch_execute(&format!("BEGIN; LOCK TABLE {name}_attempt"))
        .expect("a lock");
    let waiting = || {
        database.number("SELECT count(*) FROM pg_locks WHERE relation = '{o}_attempt'::regclass AND NOT granted")
    };
    let ann = Browser::of(&portal, &acme, Rights::all());
    std::thread::scope(|threads| {
        let slow: Vec<_> = (0..8)
            .map(|_| threads.spawn(|| ann.get(&page).status))
            .collect();
        eventually("pages of acme wait for the lock", || waiting() >= 2);
        let bob = Browser::of(&portal, &globex, Rights::all());
        for _ in 0..3 {
            let began = Instant::now();
            assert!(bob.get("/").ok().contains("globex-hook"));
            assert!(
                began.elapsed() < Duration::from_secs(1),
                "{:?}",
                began.elapsed()
            );
        }
        assert_eq!(waiting(), 2);
        other.batch_execute("COMMIT").expect("unlocked");
        let answers: Vec<StatusCode> = slow
            .into_iter()
            .map(|one| one.join().expect("answered"))
            .collect();
        assert!(answers.contains(&StatusCode::OK), "{answers:?}");
    });
}

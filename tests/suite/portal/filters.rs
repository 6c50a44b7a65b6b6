//! Filters in the portal: conditions that nobody must write as JSON.

use super::*;

/// R60: without JSON, and without a script.
#[test]
fn a_customer_chooses_by_conditions_which_events_arrive() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let ann = Browser::of(&portal, &acme, Rights::all());
    let url = acme.receiver.url();
    let own = [
        ("name", acme.endpoint.as_str()),
        ("url", url.as_str()),
        ("topic", "order.paid"),
    ];
    let row = |field, operator, value| [("field", field), ("operator", operator), ("value", value)];
    let blank = row("", "is", "");
    let gold = row("customer.tier", "is", "gold\r\n7");
    let [least, below] = [row("total", ">=", "100"), row("total", "<", "200.5")];
    let edit = format!("/endpoint/edit?{}", encoded(&own[..1]));
    let filter = || database.text("SELECT filter::text FROM {o}_endpoint WHERE name = 'acme-hook'");
    let change = |rows: &[[(&str, &str); 3]]| {
        let shown = ann.get(&edit).hidden("shown");
        let shown = [("shown", shown.as_str())];
        ann.post(
            "/endpoint/change",
            &[own.as_slice(), &shown, rows.as_flattened()].concat(),
        )
    };

    // Three empty rows at first, and more by a button, which saves nothing.
    assert_eq!(ann.get(&edit).ok().matches("name=\"field\"").count(), 3);
    let more = [own.as_slice(), gold.as_slice(), &blank, &[("more", "yes")]].concat();
    let more = ann.post("/endpoint/change", &more).ok();
    assert_eq!(more.matches("name=\"field\"").count(), 4);
    assert!(
        more.contains("value=\"customer.tier\"") && more.contains("gold\r\n7"),
        "{more}"
    );
    assert_eq!(filter(), None);

    // The row that is wrong says why, and the form is as it was sent.
    let wrong = change(&[gold, row("total<b>", ">", "x<b>")]);
    assert_eq!(wrong.status, StatusCode::UNPROCESSABLE_ENTITY);
    let (_, wrong) = wrong
        .text
        .split_once("value=\"total&lt;b&gt;\"")
        .expect("the row");
    assert!(
        wrong.starts_with(" placeholder=\"customer.tier\" aria-invalid"),
        "{wrong}"
    );
    assert!(
        wrong.contains("Enter one number") && wrong.contains("x&lt;b&gt;"),
        "{wrong}"
    );
    assert_eq!(filter(), None);

    change(&[blank, gold, least, below]);
    let saved = json!({ "customer": { "tier": ["gold", "7", 7] }, "total": [{ "numeric": [">=", 100, "<", 200.5] }] });
    assert_eq!(filter(), Some(saved.to_string()));
    let shown = ann.get(&edit).ok();
    assert_eq!(shown.matches("name=\"field\"").count(), 6);
    assert!(shown.contains(">gold\n7</textarea>"), "{shown}");
    let page = ann.get(&format!("/endpoint?{}", encoded(&own[..1]))).ok();
    assert!(
        page.contains("<code>customer.tier</code> is gold, 7"),
        "{page}"
    );

    // What is sent is what the customer chose.
    let count = acme.receiver.count();
    for (tier, total) in [
        (json!("gold"), json!(99)),
        (json!("GOLD"), json!(100)),
        (json!("7"), json!(200.5)),
        (json!("gold"), json!(100)),
        (json!(7), json!(200.4)),
    ] {
        let payload = json!({ "customer": { "tier": tier }, "total": total });
        let message = NewMessage::new("order.paid", &payload).expect("JSON");
        database.enqueue_message(message.tenant_id(acme.id));
    }
    let relay = database.keeping_relay().start().expect("a relay");
    eventually("all messages are settled", || {
        database.number("SELECT count(*) FROM {o}") == 0
    });
    end(&relay);
    let mut totals: Vec<_> = (acme.receiver.wait_for(count + 2).iter().skip(count))
        .map(|request| request.json()["total"].to_string())
        .collect();
    totals.sort();
    assert_eq!(totals, ["100", "200.4"]);

    // A form without rows changes nothing of the filter; empty rows are no filter.
    change(&[]);
    assert_eq!(filter(), Some(saved.to_string()));
    change(&[blank]);
    assert_eq!(filter(), None);
}

/// R60: also what only a program can write.
#[test]
fn a_filter_that_conditions_cannot_show_stays_until_the_customer_removes_it() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let ann = Browser::of(&portal, &acme, Rights::all());
    let program = |body: Value| Browser::patch(&portal, &acme, &body);
    let wrong = program(json!({ "filter": { "a": "b" } }));
    assert_eq!(
        (wrong.status, &wrong.json()["field"]),
        (StatusCode::UNPROCESSABLE_ENTITY, &json!("filter"))
    );
    let headers = json!({ "$header": { "x-shop": ["<b>"] } });
    let done = program(json!({ "filter": headers }));
    assert_eq!(
        (done.status, &done.json()["filter"]),
        (StatusCode::OK, &headers)
    );

    let url = acme.receiver.url();
    let own = [
        ("name", acme.endpoint.as_str()),
        ("url", url.as_str()),
        ("topic", "order.paid"),
    ];
    let edit = format!("/endpoint/edit?{}", encoded(&own[..1]));
    let filter = || database.text("SELECT filter::text FROM {o}_endpoint WHERE name = 'acme-hook'");
    let shown = ann.get(&edit).ok();
    assert!(
        shown.contains("Conditions cannot show this filter") && shown.contains("&lt;b&gt;"),
        "{shown}"
    );
    assert!(!shown.contains("name=\"field\""), "{shown}");
    let changed = ann.post(
        "/endpoint/change",
        &[own.as_slice(), &[("description", "new")]].concat(),
    );
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");
    assert_eq!(filter(), Some(headers.to_string()));
    ann.post(
        "/endpoint/change",
        &[
            own.as_slice(),
            &[("filter", "none"), ("shown", &headers.to_string())],
        ]
        .concat(),
    );
    assert_eq!(filter(), None);

    // The filter of an operator is shown, and stays.
    let by_operator = json!({ "total": [{ "numeric": [">", 1] }] });
    let operate = |filter: Option<Value>| {
        let conn = &mut database.connect();
        let outbox = database.outbox();
        let done = (outbox.endpoints()).change(conn, "acme-hook", |row| row.filter = filter);
        assert!(done.expect("changed"));
    };
    operate(Some(by_operator.clone()));
    let shown = ann.get(&edit).ok();
    assert!(
        shown.contains("set by us") && !shown.contains("name=\"filter\""),
        "{shown}"
    );
    let rows = [("field", "a"), ("operator", "is"), ("value", "b")];
    let same = by_operator.to_string();
    let typed = [("description", "typed"), ("shown", &same)];
    let refused = ann.post(
        "/endpoint/change",
        &[own.as_slice(), &typed, &rows].concat(),
    );
    assert_eq!(refused.status, StatusCode::CONFLICT, "{}", refused.text);
    assert!(
        refused.text.contains("set by us") && refused.text.contains("value=\"typed\""),
        "{}",
        refused.text
    );
    ann.post("/endpoint/change", &own);
    assert_eq!(filter(), Some(by_operator.to_string()));
    assert_eq!(
        program(json!({ "filter": null })).status,
        StatusCode::CONFLICT
    );

    // Once the operator has removed it, the customer may set one.
    operate(None);
    let changed = ann.post("/endpoint/change", &[own.as_slice(), &rows].concat());
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");
    assert_eq!(filter(), Some(json!({ "a": ["b"] }).to_string()));
}

/// R60: a form that was opened before a program changed the filter.
#[test]
fn a_form_changes_no_filter_that_it_has_not_shown() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let ann = Browser::of(&portal, &acme, Rights::all());
    let program = |filter: &Value| {
        let done = Browser::patch(&portal, &acme, &json!({ "filter": filter }));
        assert_eq!(done.status, StatusCode::OK, "{}", done.text);
    };
    let url = acme.receiver.url();
    let own = [
        ("name", acme.endpoint.as_str()),
        ("url", url.as_str()),
        ("topic", "order.paid"),
        ("description", "typed"),
    ];
    let open = || ann.get(&format!("/endpoint/edit?{}", encoded(&own[..1])));
    let change = |form: &Seen, more: &[(&str, &str)]| {
        let shown = form.hidden("shown");
        let pairs = [own.as_slice(), &[("shown", &shown)], more].concat();
        ann.post("/endpoint/change", &pairs)
    };
    let row = |column: &str| {
        database.text(&format!(
            "SELECT {column}::text FROM {{o}}_endpoint WHERE name = 'acme-hook'"
        ))
    };
    let is_shown_again = |refused: &Seen| {
        assert_eq!(refused.status, StatusCode::CONFLICT, "{refused:?}");
        assert!(
            refused.text.contains("was changed meanwhile") && refused.text.contains("\"typed\""),
            "{refused:?}"
        );
        assert_eq!(Some(refused.hidden("shown")), row("filter"));
        assert_ne!(row("description"), Some("typed".to_owned()));
    };
    let blank = [("field", ""), ("operator", "is"), ("value", "")];
    let headers = json!({ "$header": { "x-shop": ["<b>"] } });
    let country = json!({ "country": ["DE"] });

    // Rows that were empty, or filled in.
    let stale = open();
    program(&headers);
    let filled = [("field", "a"), ("operator", "is"), ("value", "b")];
    for rows in [blank, filled] {
        let refused = change(&stale, &rows);
        is_shown_again(&refused);
        assert!(!refused.text.contains("name=\"field\""), "{refused:?}");
    }

    // More rows show no new filter.
    let more = change(&stale, &[blank.as_slice(), &[("more", "yes")]].concat());
    assert_eq!(more.status, StatusCode::OK);
    is_shown_again(&change(&more, &blank));

    // The removal of a filter that is another one now.
    let stale = open();
    program(&country);
    let refused = change(&stale, &[("filter", "none")]);
    is_shown_again(&refused);
    assert!(refused.text.contains("value=\"country\""), "{refused:?}");

    // What leaves the filter unchanged is saved, and so is the form with the new filter.
    let changed = change(&stale, &[]);
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");
    assert_eq!(row("description"), Some("typed".to_owned()));
    assert_eq!(row("filter"), Some(country.to_string()));
    let changed = change(&refused, &blank);
    assert!(changed.location.ends_with("done=changed"), "{changed:?}");
    assert_eq!(row("filter"), None);
}

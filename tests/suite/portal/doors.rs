//! Who may enter the portal, and what nobody sees there.

use super::*;

/// R60: over every route of pages and JSON, with each parameter.
#[test]
fn a_tenant_sees_guesses_and_touches_nothing_of_another() {
    let (database, acme, globex) = two();
    let secret = database.text("SELECT secret FROM {o}_endpoint WHERE name = 'acme-hook'");
    let secret = secret.expect("a secret");
    let (id, delivered, dead) = (acme.id, acme.delivered, acme.dead);
    let [id, delivered, dead] = [id, delivered, dead].map(|id| id.to_string());
    let sequence = database.number("SELECT sequence FROM {o}_dead WHERE topic = 'acme.event'");
    let sequence = format!("{sequence}.{dead}");
    let feed_of = |word: &str| format!("{word}-feed");
    for tenant in [&acme, &globex] {
        let feed = Endpoint::feed(feed_of(tenant.word)).tenant(tenant.id);
        let feed = feed.topics([format!("{}.feed", tenant.word)]);
        let (outbox, conn) = (database.outbox(), &mut database.connect());
        outbox.endpoints().put(conn, &feed).expect("put");
    }
    let theirs = [
        &acme.endpoint,
        &feed_of(acme.word),
        &id,
        &delivered,
        &dead,
        &sequence,
        "acme.event",
    ];
    let of_acme = [acme.word, &id, &delivered, &dead, &secret];
    let [own_dead, own_delivered] = [globex.dead, globex.delivered].map(|id| id.to_string());
    let url = globex.receiver.url();
    let own = |door: &Door, parameter: &str, is_json: bool| match parameter {
        "name" if door.is_of_feeds() => feed_of(globex.word),
        "name" => globex.endpoint.clone(),
        // The dead letter waits again after its page has sent it.
        "id" if is_json => own_delivered.clone(),
        "id" => own_dead.clone(),
        "url" => url.clone(),
        "topic" | "topics" => "order.paid".to_owned(),
        "since" => "2000-01-01T00:00".to_owned(),
        "missing" | "sure" | "dry_run" => "yes".to_owned(),
        _ => door.of_events(parameter).to_owned(),
    };
    let before = rows_of(&database, &acme);
    let mut strict = config(&database);
    strict.endpoint_public_only = true;
    for config in [config(&database), strict] {
        let portal = portal(&config);
        let spy = Browser::of(&portal, &globex, Rights::all());
        let token = spy.get("/endpoints/new").hidden("form_token");
        for door in Door::all(&spy) {
            let (path, takes) = (&door.path, &door.takes);
            let send = |values: &[(&str, String)]| {
                // As it was, whatever the last request did to it.
                let others = "DELETE FROM {o}_endpoint WHERE name NOT LIKE 'acme-%' AND name NOT LIKE 'globex-%'";
                database.execute(others);
                database.execute("DELETE FROM {o}_audit");
                globex.put(&database);
                let pairs = values.iter().map(|(name, value)| (*name, value.as_str()));
                let mut pairs: Vec<(&str, &str)> = pairs.collect();
                if !door.is_json {
                    let extra = ["tenant", "tenant_id", "destination", "registration"];
                    pairs.extend(extra.map(|name| (name, id.as_str())));
                    pairs.push(("form_token", &token));
                }
                let seen = door.ask(&spy, &pairs);
                // What the request itself says is no news.
                let mut text = format!("{} {} {}", seen.location, seen.cookie, seen.text);
                for (_, value) in values {
                    let escaped = encoded(&[("", value)]);
                    text = text.replace(value, "").replace(&escaped[1..], "");
                }
                for word in of_acme {
                    assert!(
                        !text.contains(word),
                        "{path} {values:?} shows {word}: {text}"
                    );
                }
                assert_eq!(rows_of(&database, &acme), before, "{path} {values:?}");
                seen
            };
            let all_own: Vec<(&str, String)> = takes
                .iter()
                .map(|name| (name.as_str(), own(&door, name, door.is_json)))
                .collect();
            let seen = send(&all_own);
            if !config.endpoint_public_only && !path.ends_with("/verify") {
                let is_done = seen.status.is_success() || seen.status.is_redirection();
                assert!(is_done, "{path} works for the own: {}", seen.text);
            }
            for value in theirs {
                send(
                    &takes
                        .iter()
                        .map(|name| (name.as_str(), value.to_owned()))
                        .collect::<Vec<_>>(),
                );
                for (n, name) in takes.iter().enumerate() {
                    let mut values = all_own.clone();
                    values[n].1 = value.to_owned();
                    let seen = send(&values);
                    if name == "name"
                        && [acme.endpoint.as_str(), &feed_of(acme.word)].contains(&value)
                    {
                        assert_eq!(seen.status, StatusCode::NOT_FOUND, "{path}: {}", seen.text);
                    }
                }
            }
        }
    }
    assert_eq!(acme.receiver.count(), 2, "nothing was sent there");
    // The same words are there for their owner.
    let portal = portal(&config(&database));
    let owner = Browser::of(&portal, &acme, Rights::all());
    assert!(owner.get("/").ok().contains("acme-hook"));
    let one = encoded(&[("name", &acme.endpoint), ("id", &dead)]);
    assert!(
        owner
            .get(&format!("/delivery?{one}"))
            .ok()
            .contains("acme.event")
    );
}

/// R60
#[test]
fn links_end_and_cannot_be_forged() {
    let database = Database::new();
    let portal = portal(&config(&database)).base("/webhooks");
    let tenant = Uuid::now_v7();
    let link = portal.link(tenant, HOUR);
    assert!(link.starts_with("/webhooks/open?token="), "{link}");
    let stranger = Browser::unknown(&portal);
    let other = Uuid::now_v7().simple().to_string();
    for (path, words) in [
        ("/webhooks/".to_owned(), "A link is needed"),
        (portal.link(tenant, Duration::ZERO), "This link has expired"),
        (
            link.replace(&tenant.simple().to_string(), &other),
            "This link is not valid",
        ),
        ("/webhooks/open?token=".to_owned(), "This link is not valid"),
        (
            Pages::portal(&config(&database), &database.secret_url())
                .expect("a portal")
                .link(tenant, HOUR),
            "This link is not valid",
        ),
    ] {
        let refused = stranger.get(&path);
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{path}");
        assert!(
            refused.text.contains(words) && refused.cookie.is_empty(),
            "{path}: {refused:?}"
        );
    }
    let opened = Browser::opening(&portal, &link);
    assert!(
        opened
            .get("/webhooks/")
            .ok()
            .contains("href=\"/webhooks/deliveries\"")
    );
    // Where a proxy ends TLS, the cookie stays there.
    let by_tls = stranger.ask(Method::GET, &link, &[("x-forwarded-proto", "https")], "");
    assert!(by_tls.cookie.ends_with("; Secure"), "{}", by_tls.cookie);
    // The token of a link is no cookie.
    let (_, token) = link.split_once('=').expect("a token");
    let name = opened.cookie.split('=').next().expect("a name");
    let forged = Browser {
        cookie: format!("{name}={token}"),
        ..stranger.clone()
    };
    assert_eq!(forged.get("/webhooks/").status, StatusCode::FORBIDDEN);
    // Operators are no tenant's.
    let operator = Browser {
        visitor: Visitor::known("ann", Rights::all()),
        ..opened
    };
    assert_eq!(operator.get("/webhooks/").status, StatusCode::FORBIDDEN);
    let short = Pages::portal(&config(&database), &database.secret_url())
        .expect("a portal")
        .key("short");
    assert!(matches!(short, Err(PagesError::ShortKey(5))));
}

/// What a browser sends to try a route as the owner of acme's things.
fn of_acme(door: &Door, acme: &Tenant, form_token: &str) -> Vec<(String, String)> {
    let value = |name: &str| match name {
        "name" => acme.endpoint.clone(),
        "id" => acme.dead.to_string(),
        "url" => acme.receiver.url(),
        "since" => "2000-01-01T00:00".to_owned(),
        "missing" | "sure" | "dry_run" => "yes".to_owned(),
        _ => door.of_events(name).to_owned(),
    };
    let mut values: Vec<(String, String)> = door
        .takes
        .iter()
        .map(|name| (name.clone(), value(name)))
        .collect();
    if !door.is_json {
        values.push(("form_token".to_owned(), form_token.to_owned()));
    }
    values
}

/// R60: over every route of pages and JSON. The link itself, the cookie that it has become, and its token in a program.
#[test]
fn after_its_time_a_link_opens_nothing_however_it_is_sent_again() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database));
    let link = portal.link(acme.id, Duration::from_secs(3));
    let (_, token) = link.split_once('=').expect("a token");
    let ann = Browser::opening(&portal, &link);
    let form_token = ann.get("/endpoints/new").hidden("form_token");
    let program = Browser {
        token: token.to_owned(),
        ..Browser::unknown(&portal)
    };
    assert!(program.get("/api/v1/endpoints").ok().contains("acme-hook"));
    let doors = Door::all(&Browser::of(&portal, &acme, Rights::all()));
    let before = rows_of(&database, &acme);
    eventually("the link has expired", || {
        ann.get("/").status == StatusCode::FORBIDDEN
    });
    let again = Browser::unknown(&portal).get(&link);
    assert_eq!(again.status, StatusCode::FORBIDDEN);
    assert!(again.cookie.is_empty() && again.text.contains("This link has expired"));
    every_door_is_closed(&[ann, program], &doors, &acme, &form_token);
    assert_eq!(rows_of(&database, &acme), before);
}

fn every_door_is_closed(spies: &[Browser<'_>], doors: &[Door], acme: &Tenant, form_token: &str) {
    for spy in spies {
        for door in doors {
            let values = of_acme(door, acme, form_token);
            let values: Vec<(&str, &str)> = values
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            let seen = door.ask(spy, &values);
            let refused = match door.is_json {
                true => StatusCode::UNAUTHORIZED,
                false => StatusCode::FORBIDDEN,
            };
            assert_eq!(seen.status, refused, "{} {}", door.path, seen.text);
            assert!(!seen.text.contains(&acme.endpoint), "{}", seen.text);
        }
    }
}

/// R60: over every route of pages and JSON, with tokens and cookies that say more than what was signed, or that another
/// key or purpose has signed.
#[test]
fn forged_tokens_and_cookies_open_nothing() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let rights = Rights::look().with_payloads(true);
    let token = portal.token(globex.id, HOUR, rights);
    let owner = Browser::opening(&portal, &portal.link_with(globex.id, HOUR, rights));
    let (name, cookie) = owner.cookie.split_once('=').expect("a cookie");
    let others = Pages::portal(&config(&database), &database.secret_url()).expect("a portal");
    let others = others.key([8; 32]).expect("a key");
    let [own, other] = [&globex, &acme].map(|one| one.id.simple().to_string());
    let forged = |signed: &str| {
        let (until, _) = signed.split_once('.').expect("a time");
        let longer = (until.parse::<u64>().expect("seconds") + 1).to_string();
        let (text, signature) = signed.rsplit_once('.').expect("a signature");
        vec![
            signed.replacen(until, &longer, 1),
            signed.replacen(&own, &other, 1),
            signed.replacen(".p.", ".aps.", 1),
            text.to_owned(),
            format!("{text}."),
            format!("{text}.{}", signature.replace(|_| true, "0")),
            format!("{signed}0"),
            "x".repeat(10_000),
            "...".to_owned(),
            format!("{}.{other}.aps..{signature}", u64::MAX),
        ]
    };
    let mut tokens = forged(&token);
    tokens.extend([
        cookie.to_owned(),
        others.token(acme.id, HOUR, Rights::all()),
    ]);
    let mut cookies = forged(cookie);
    cookies.push(token.clone());
    let programs = tokens.into_iter().map(|token| Browser {
        token,
        ..Browser::unknown(&portal)
    });
    let visitors = cookies.into_iter().map(|cookie| Browser {
        cookie: format!("{name}={cookie}"),
        ..Browser::unknown(&portal)
    });
    let spies: Vec<Browser<'_>> = programs.chain(visitors).collect();
    let doors = Door::all(&Browser::of(&portal, &acme, Rights::all()));
    every_door_is_closed(&spies, &doors, &acme, "");
    for spy in &spies {
        let opened = Browser::unknown(&portal).get(&format!("/open?token={}", spy.token));
        assert_eq!(opened.status, StatusCode::FORBIDDEN, "{}", spy.token);
    }
}

/// R60
#[test]
fn processes_with_one_key_accept_each_others_links_sessions_and_forms() {
    let (database, acme, _) = two();
    let portals = [portal(&config(&database)), portal(&config(&database))];
    let ann = Browser::opening(&portals[1], &portals[0].link(acme.id, HOUR));
    let there = Browser {
        portal: &portals[0],
        ..ann.clone()
    };
    let token = ann.get("/endpoints/new").hidden("form_token");
    let form = encoded(&[("name", &acme.endpoint), ("form_token", &token)]);
    let done = there.ask(Method::POST, "/endpoint/disable", &[], &form);
    assert!(done.location.ends_with("done=disabled"), "{done:?}");
    assert!(ann.get(&done.location).ok().contains("was disabled here"));
    let program = Browser {
        token: portals[0].token(acme.id, HOUR, Rights::look()),
        ..Browser::unknown(&portals[1])
    };
    assert!(program.get("/api/v1/endpoints").ok().contains("acme-hook"));
}

/// R60: on every page, also behind a proxy that removes the path.
#[test]
fn below_a_path_all_addresses_of_the_portal_lead_below_it() {
    let (database, acme, _) = two();
    let portal = portal(&config(&database))
        .base("/shop/webhooks")
        .logo("image/svg+xml", "<svg/>");
    let ann = Browser::opening(&portal, &portal.link(acme.id, HOUR));
    let mut to_read = vec!["/shop/webhooks/".to_owned()];
    let mut read = BTreeSet::new();
    while let Some(path) = to_read.pop() {
        if !read.insert(path.clone()) {
            continue;
        }
        let within = path.strip_prefix("/shop/webhooks").expect("below the base");
        let page = ann.get(&path).ok();
        assert_eq!(ann.get(within).ok().len(), page.len(), "{path}");
        for attribute in ["href", "src", "action", "formaction"] {
            let mark = format!(" {attribute}=\"");
            for (index, _) in page.match_indices(&mark) {
                let rest = &page[index + mark.len()..];
                let address = rest
                    .split('"')
                    .next()
                    .expect("an end")
                    .replace("&amp;", "&");
                if address.starts_with('#') {
                    continue;
                }
                assert!(address.starts_with("/shop/webhooks/"), "{path}: {address}");
                if matches!(attribute, "href" | "src") {
                    to_read.push(address);
                }
            }
        }
    }
    let pages = portal_routes().filter(|(method, ..)| *method == Method::GET);
    for (_, page, _) in pages {
        let is_read =
            |one: &String| one.split('?').next() == Some(format!("/shop/webhooks{page}").as_str());
        assert!(read.iter().any(is_read), "{page}: {read:?}");
    }
    let done = ann.post(
        "/shop/webhooks/endpoint/disable",
        &[("name", &acme.endpoint)],
    );
    assert!(
        done.location.starts_with("/shop/webhooks/endpoint?"),
        "{done:?}"
    );
}

/// R60: over every page.
#[test]
fn without_the_right_no_page_shows_content_or_a_form() {
    let (database, acme, _) = two();
    let mut public = config(&database);
    // Otherwise no response is shown to customers.
    public.endpoint_public_only = true;
    let portal = portal(&public);
    let seen = |rights: Rights| {
        let ann = Browser::of(&portal, &acme, rights);
        let doors = Door::all(&ann);
        let pages = doors
            .iter()
            .filter(|door| !door.is_json && door.method == Method::GET);
        let shown = pages.map(|door| {
            let values = of_acme(door, &acme, "");
            let values: Vec<(&str, &str)> = values
                .iter()
                .map(|(name, value)| (name.as_str(), value.as_str()))
                .collect();
            door.ask(&ann, &values).text
        });
        shown.collect::<String>()
    };
    let (all, few) = (seen(Rights::all()), seen(Rights::look()));
    for hidden in ["x-shop", "says so", "method=\"post\"", "/endpoints/new"] {
        assert!(all.contains(hidden) && !few.contains(hidden), "{hidden}");
    }
}

/// R60: over every act.
#[test]
fn a_form_needs_the_right_and_the_token_of_its_own_session() {
    let (database, acme, globex) = two();
    let portal = portal(&config(&database));
    let link = portal.link(acme.id, HOUR);
    let own = Browser::opening(&portal, &link);
    let token = |browser: &Browser<'_>| browser.get("/endpoints/new").hidden("form_token");
    let others = [
        String::new(),
        token(&Browser::opening(&portal, &link)),
        token(&Browser::of(&portal, &acme, Rights::all())),
        token(&Browser::of(&portal, &globex, Rights::all())),
    ];
    let looks = portal.link_with(acme.id, HOUR, Rights::look());
    let looks = Browser::opening(&portal, &looks);
    let without_secrets = portal.link_with(acme.id, HOUR, Rights::look().with_act(true));
    let without_secrets = Browser::opening(&portal, &without_secrets);
    let before = rows_of(&database, &acme);
    let fields = [("name", acme.endpoint.as_str()), ("sure", "yes")];
    for (_, path, _) in portal_routes().filter(|(method, ..)| method == Method::POST) {
        for token in &others {
            let form = encoded(&[fields.as_slice(), &[("form_token", token)]].concat());
            let refused = own.ask(Method::POST, path, &[], &form);
            assert_eq!(refused.status, StatusCode::FORBIDDEN, "{path}");
        }
        let form = encoded(&[fields.as_slice(), &[("form_token", &token(&own))]].concat());
        let foreign = own.ask(
            Method::POST,
            path,
            &[("sec-fetch-site", "cross-site")],
            &form,
        );
        assert_eq!(foreign.status, StatusCode::FORBIDDEN, "{path}");
        let refused = looks.ask(Method::POST, path, &[], &form);
        assert_eq!(refused.status, StatusCode::FORBIDDEN, "{path}");
    }
    let one = format!("/endpoint?{}", encoded(&fields));
    assert!(!looks.get(&one).ok().contains("<form"));
    let rotate = without_secrets.post("/endpoint/rotate", &fields);
    assert_eq!(rotate.status, StatusCode::FORBIDDEN);
    assert_eq!(rows_of(&database, &acme), before);
    let url = acme.receiver.url();
    let added = [("url", url.as_str()), ("topic", "order.paid")];
    let added = without_secrets.post("/endpoints/add", &added);
    assert!(added.location.ends_with("done=added"), "{added:?}");

    // Without the right, no payload.
    let delivery = encoded(&[("name", &acme.endpoint), ("id", &acme.dead.to_string())]);
    let delivery = format!("/delivery?{delivery}");
    assert!(own.get(&delivery).ok().contains("x-shop"));
    let hidden = looks.get(&delivery).ok();
    assert!(!hidden.contains("x-shop") && hidden.contains("You may not see the content"));
}

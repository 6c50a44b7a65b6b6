//! What a request needs, and what its answer hides.

use super::*;

/// R60: over every route of both tables.
#[test]
fn each_route_needs_a_token_and_each_act_the_right_and_no_forged_cookie() {
    let (database, acme, _) = two();
    let (pages, portal) = (pages(&database), portal(&database));
    let token = portal.token(acme.id, HOUR, Rights::all());
    let customer = |rights| Visitor::of_tenant(acme.id, "ann", rights);
    let operator = |rights| Visitor::known("ann", rights);
    let rows = || crate::tenants::rows_of(&database, &acme);
    let before = rows();
    for (program, known, other) in [
        (
            Program::new(&pages, TOKEN),
            &operator as &dyn Fn(Rights) -> Visitor,
            customer(Rights::all()),
        ),
        (
            Program::new(&portal, &token),
            &customer,
            operator(Rights::all()),
        ),
    ] {
        let stranger = || Visitor::unknown(STRANGER.into());
        let send = |method: &Method, path: &str, visitor, headers: &[(&str, &str)]| {
            let request = Request::builder()
                .method(method)
                .uri(format!("/api/v1{path}"));
            let request = headers
                .iter()
                .chain(&[("host", "localhost"), ("content-type", "application/json")])
                .fold(request, |request, (name, value)| {
                    request.header(*name, *value)
                });
            let response = program
                .handler
                .respond(request.body(b"{}".to_vec()).expect("a request"), visitor);
            let (status, answer) = read(&response);
            if ![404, 405].contains(&status.as_u16()) {
                program.fits(method, path, status, &answer);
            }
            status
        };
        for (method, path) in program.routes("acme-hook") {
            assert_eq!(
                send(&method, &path, stranger(), &[]),
                401,
                "{method} {path}"
            );
            let wrong = [("authorization", "Bearer nonsense")];
            // After too many wrong tokens, 429.
            let refused = send(&method, &path, stranger(), &wrong);
            assert!([401, 429].contains(&refused.as_u16()), "{method} {path}");
            let expected = match path.ends_with("/events")
                && program.document["info"]["title"] == "Outbox, for operators"
            {
                // Operators' pages, too, answer the events of a tenant's feed to the tenant.
                true => 404,
                false => 403,
            };
            assert_eq!(
                send(&method, &path, other.clone(), &[]),
                expected,
                "{method} {path}"
            );
            if method == Method::GET {
                continue;
            }
            let looks = Rights::all().with_act(false);
            assert_eq!(
                send(&method, &path, known(looks), &[]),
                403,
                "{method} {path}"
            );
            for of_browser in [
                &[("cookie", "shop=1")] as &[_],
                &[("origin", "https://localhost")],
                &[("sec-fetch-site", "cross-site")],
                &[
                    ("cookie", "shop=1"),
                    ("origin", "https://localhost"),
                    ("x-form-token", "x"),
                ],
            ] {
                let refused = send(&method, &path, known(Rights::all()), of_browser);
                assert_eq!(refused, 403, "{method} {path} {of_browser:?}");
            }
            for body in ["{}", ""] {
                let form = Request::builder()
                    .method(&method)
                    .uri(format!("/api/v1{path}"))
                    .header("host", "localhost")
                    .header("content-type", "text/plain")
                    .body(body.as_bytes().to_vec())
                    .expect("a request");
                let refused = program.handler.respond(form, known(Rights::all()));
                assert_eq!(read(&refused).0, 415, "{method} {path}");
            }
        }
        let lost = Request::get("/api/v1/nothing").header("host", "localhost");
        let lost = lost.body(Vec::new()).expect("a request");
        let (status, problem) = read(&program.handler.respond(lost, known(Rights::all())));
        assert_eq!(status, 404);
        let detail = problem["detail"].as_str().expect("what to do");
        assert!(detail.contains("openapi.json"), "{detail}");
        for (method, path, status) in [(Method::PUT, "/openapi.json", 405), (Method::GET, "", 404)]
        {
            assert_eq!(
                send(
                    &method,
                    &format!("/{}", path.trim_start_matches('/')),
                    known(Rights::all()),
                    &[]
                ),
                status,
                "{path}"
            );
        }
    }
    assert_eq!(rows(), before);
}

/// R60: a request that cannot be read, too.
#[test]
fn a_request_with_two_tokens_is_refused_as_documented() {
    let database = Database::new();
    let (pages, portal) = (pages(&database), portal(&database).base("/webhooks"));
    let token = portal.token(Uuid::now_v7(), HOUR, Rights::all());
    for (program, path, base) in [
        (Program::new(&pages, TOKEN), "/audit", ""),
        (Program::new(&portal, &token), "/topics", "/webhooks"),
    ] {
        let request = Request::get(format!("{base}/api/v1{path}"))
            .header("authorization", format!("Bearer {}", program.token))
            .header("authorization", "Bearer another");
        let request = request.body(Vec::new()).expect("a request");
        let response = program
            .handler
            .respond(request, Visitor::unknown(STRANGER.into()));
        let (status, answer) = read(&response);
        assert_eq!(status, 400, "{answer}");
        program.fits(&Method::GET, path, status, &answer);
    }
}

/// R60: the token of the pages' forms lets the scripts of these pages act.
#[test]
fn a_session_acts_with_the_token_of_its_forms() {
    let (database, acme, _) = two();
    let portal = portal(&database);
    let send = |method, path: &str, headers: &[(&str, &str)]| {
        let request = Request::builder().method(method).uri(path);
        let request = headers
            .iter()
            .chain(&[("host", "shop.example"), ("sec-fetch-site", "same-origin")])
            .fold(request, |request, (name, value)| {
                request.header(*name, *value)
            });
        let visitor = Visitor::unknown(STRANGER.into());
        portal.respond(request.body(Vec::new()).expect("a request"), visitor)
    };
    let opened = send("GET", &portal.link(acme.id, HOUR), &[]);
    let cookie = opened.headers()["set-cookie"].to_str().expect("text");
    let cookie = cookie.split(';').next().expect("a cookie");
    let form = send("GET", "/endpoints/new", &[("cookie", cookie)]);
    let form = String::from_utf8_lossy(form.body()).into_owned();
    let (_, rest) = form
        .split_once("name=\"form_token\" value=\"")
        .expect("a form");
    let token = rest.split('"').next().expect("a token");
    let disable = "/api/v1/endpoints/acme-hook/disable";
    assert_eq!(send("POST", disable, &[("cookie", cookie)]).status(), 403);
    let with_token = [("cookie", cookie), ("x-form-token", token)];
    assert_eq!(send("POST", disable, &with_token).status(), 200);
}

/// R60: without the rights, no content and no secret.
#[test]
fn json_hides_what_the_pages_hide() {
    let (database, acme, _) = two();
    let (pages, portal) = (pages(&database), portal(&database));
    let look = Rights::look().with_act(true);
    database.execute("UPDATE {o}_endpoint SET url = url || '/hunter2'");
    let ask = |handler: &dyn Handler, visitor: Visitor, method: &Method, path: &str| {
        let request = Request::builder()
            .method(method)
            .uri(format!("/api/v1{path}"))
            .header("host", "localhost");
        read(&handler.respond(request.body(Vec::new()).expect("a request"), visitor))
    };
    let operator = || Visitor::known("ann", look);
    let (_, shown) = ask(
        &pages,
        operator(),
        &Method::GET,
        &format!("/messages/{}", acme.dead),
    );
    assert!(!shown.to_string().contains("x-shop") && shown["rows"][0]["payload"].is_null());
    let (_, shown) = ask(&pages, operator(), &Method::GET, "/endpoints/acme-hook");
    assert!(!shown.to_string().contains("hunter2"), "{shown}");
    let (_, found) = ask(&pages, operator(), &Method::GET, "/endpoints?q=hunter2");
    assert_eq!(found["data"], json!([]));
    let (_, found) = ask(&pages, operator(), &Method::GET, "/endpoints?q=127.0.0.1");
    assert_eq!(found["data"].as_array().map(Vec::len), Some(2));
    // Nor does the next page tell that there is a match.
    database.execute(
        "INSERT INTO {o}_endpoint (name, url, topics)
         SELECT 'n' || n, 'https://globex.example/a/hunter2', '{*}' FROM generate_series(1, 5) n",
    );
    let few = "/endpoints?limit=2&q=hunter2";
    let (_, found) = ask(&pages, operator(), &Method::GET, few);
    assert_eq!((&found["data"], &found["next"]), (&json!([]), &Value::Null));
    let rotate = "/endpoints/acme-hook/rotate";
    let (status, rotated) = ask(&pages, operator(), &Method::POST, rotate);
    assert_eq!((status, &rotated["secret"]), (StatusCode::OK, &Value::Null));
    let customer = || Visitor::of_tenant(acme.id, "ann", look);
    let one = format!("/endpoints/acme-hook/deliveries/{}", acme.dead);
    let (_, shown) = ask(&portal, customer(), &Method::GET, &one);
    assert!(
        shown["payload"].is_null() && !shown.to_string().contains("says so"),
        "{shown}"
    );
    let (status, _) = ask(
        &portal,
        customer(),
        &Method::POST,
        "/endpoints/acme-hook/rotate",
    );
    assert_eq!(status, StatusCode::FORBIDDEN);
}

/// R60: over every route that reads, of both tables.
#[test]
fn without_the_right_no_route_shows_content() {
    const CONTENT: [&str; 3] = ["x-shop", "says so", "hunter2"];
    let (database, acme, _) = two();
    database.execute("UPDATE {o}_endpoint SET url = url || '/hunter2'");
    let mut public = config(&database);
    // Otherwise no response is shown to customers.
    public.endpoint_public_only = true;
    let portal = Pages::portal(&public, &database.secret_url()).expect("a portal");
    let portal = portal.key([7; 32]).expect("a key");
    let pages = pages(&database);
    let token = portal.token(acme.id, HOUR, Rights::all());
    database.execute(&format!(
        "INSERT INTO {{o}}_endpoint (name, kind, url, tenant_id) VALUES ('acme-feed', 'feed', '', '{}')",
        acme.id
    ));
    let letter = database
        .text("SELECT sequence || '.' || message_id FROM {o}_dead WHERE topic = 'acme.event'");
    let (letter, dead) = (letter.expect("a letter"), acme.dead.to_string());
    let operator = |rights| Visitor::known("ann", rights);
    let customer = |rights| Visitor::of_tenant(acme.id, "ann", rights);
    // A customer sees the URL that the customer has written.
    for (program, visitor, words) in [
        (
            Program::new(&pages, TOKEN),
            &operator as &dyn Fn(Rights) -> Visitor,
            &CONTENT[..],
        ),
        (Program::new(&portal, &token), &customer, &CONTENT[..2]),
    ] {
        let seen = |rights: Rights| {
            let paths = program.document["paths"].as_object().expect("paths");
            let read = paths.iter().filter(|(path, operations)| {
                operations.get("get").is_some() && !path.ends_with("/events")
            });
            let texts = read.map(|(template, _)| {
                let name = match template.starts_with("/feeds/") {
                    true => "acme-feed",
                    false => "acme-hook",
                };
                let path = ["{name}", "{key}", "{id}", "{letter}"]
                    .into_iter()
                    .zip([name, &dead, &dead, &letter])
                    .fold(template.clone(), |path, (name, value)| {
                        path.replace(name, value)
                    });
                assert!(!path.contains('{'), "{path}");
                let request = Request::get(format!("/api/v1{path}")).header("host", "localhost");
                let request = request.body(Vec::new()).expect("a request");
                let (status, answer) =
                    self::read(&program.handler.respond(request, visitor(rights)));
                assert_eq!(status, 200, "{path}: {answer}");
                answer.to_string()
            });
            texts.collect::<String>()
        };
        let (all, few) = (
            seen(Rights::all()),
            seen(Rights::all().with_payloads(false)),
        );
        for word in words {
            assert!(all.contains(word) && !few.contains(word), "{word}");
        }
    }
    // Whoever may not see secrets gets none with a new endpoint.
    let few = Program::new(
        &portal,
        &portal.token(acme.id, HOUR, Rights::look().with_act(true)),
    );
    let body = json!({ "url": "https://acme.example/", "topics": [] });
    let added = few.post("/endpoints", body);
    assert_eq!(added["secret"], Value::Null, "{added}");
}

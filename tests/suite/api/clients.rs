//! The documents of OpenAPI, and clients that were made from them.

use super::*;

/// A Python that has the validator and the generator of clients.
fn python() -> Command {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
    let target = target.expect("the build's folder");
    let python = target.join("openapi/venv/bin/python");
    assert!(
        python.exists(),
        "{} is missing: run `make test`",
        python.display()
    );
    Command::new(python)
}

/// Makes a client from a document, and runs a script that uses it. Returns what the script prints.
fn run_client(document: &str, script: &str, arguments: &[&str]) -> String {
    let file = File::new(document);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("client-{}", Uuid::now_v7()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let run = |command: &mut Command| {
        let ended = command.output().expect("Python runs");
        let said = [ended.stdout, ended.stderr].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(ended.status.success(), "{said}");
        said
    };
    run(python()
        .args(["-m", "openapi_python_client", "generate", "--meta", "none"])
        .args(["--path", file.path(), "--output-path"])
        .arg(folder.join("client")));
    let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/openapi");
    let script = scripts.join(script);
    let said = run(python().arg("-B").arg(script).arg(&folder).args(arguments));
    std::fs::remove_dir_all(folder).expect("removed");
    said
}

/// R60: the server of the program reads each method that the document names.
#[test]
fn the_program_serves_every_method_of_its_document() {
    let database = Database::new();
    let command = database.binary(&["admin"]);
    let page = Page::start(command.with("OUTBOX_ADMIN_TOKEN", TOKEN));
    let bearer = format!("authorization: Bearer {TOKEN}");
    let document = page.request("GET /api/v1/openapi.json", &[&bearer], "");
    let document: Value = serde_json::from_str(&document.body).expect("a document");
    let mut tried = 0;
    for (path, methods) in document["paths"].as_object().expect("paths") {
        let filled = path.split('/').map(|part| match part.starts_with('{') {
            true => "none",
            false => part,
        });
        let filled = filled.collect::<Vec<_>>().join("/");
        let methods = methods.as_object().expect("methods").keys();
        for method in
            methods.filter(|one| ["get", "post", "patch", "delete", "put"].contains(&one.as_str()))
        {
            let line = format!("{} /api/v1{filled}", method.to_uppercase());
            let request = format!(
                "{line} HTTP/1.1\r\nhost: {}\r\n{bearer}\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}",
                page.address
            );
            let answer = page.raw(request.as_bytes());
            assert!(![405, 501].contains(&answer.status), "{line}: {answer:?}");
            tried += usize::from(["patch", "delete"].contains(&method.as_str()));
        }
    }
    assert!(tried >= 3, "{tried} of PATCH and DELETE");
    let answer = page.request("DELETE /", &[&bearer], "");
    assert_eq!(answer.status, 405);
    assert_eq!(answer.header("allow"), Some("GET, HEAD, POST"));
}

/// R60: in another language, over a real socket.
#[test]
fn a_client_that_was_made_from_the_document_registers_lists_and_recovers() {
    let database = Database::new();
    let command = database.binary(&["admin"]);
    let page = Page::start(command.with("OUTBOX_ADMIN_TOKEN", TOKEN));
    let bearer = format!("authorization: Bearer {TOKEN}");
    let document = page.request("GET /api/v1/openapi.json", &[&bearer], "");
    assert_eq!(document.status, 200, "{document:?}");
    let url = format!("http://{}/api/v1", page.address);
    let arguments = [url.as_str(), TOKEN, "https://customer.example/"];
    let said = run_client(&document.body, "client.py", &arguments);
    assert!(said.contains("'changed': 0"), "{said}");
    let names = database.text("SELECT string_agg(name, ' ') FROM {o}_endpoint");
    assert_eq!(names.as_deref(), Some("acme"));
}

/// R73: a feed is read by a client in another language, which checks positions and ids.
#[test]
fn a_client_that_was_made_from_the_document_reads_ten_thousand_events() {
    let database = Database::new();
    let put = ["endpoint", "put", "crm", "--feed", "--topic", "order.*"];
    finish(database.binary(&put)).code(0);
    let made = finish(database.binary(&["feed", "token", "crm"])).code(0);
    let token = made.stdout.trim();
    database.execute(
        "INSERT INTO {o} (topic, payload, ordering_key)
         SELECT 'order.paid', json_build_object('n', n), CASE n % 2 WHEN 0 THEN 'k' || n % 20 END FROM generate_series(1, 10000) n",
    );
    let command = database.binary(&["run"]);
    let command = command.with("OUTBOX_ADMIN_TOKEN", TOKEN);
    let page = Page::start(command.with("OUTBOX_ENDPOINT_THREADS", "2"));
    let bearer = format!("authorization: Bearer {TOKEN}");
    let document = page.request("GET /api/v1/openapi.json", &[&bearer], "");
    let url = format!("http://{}/api/v1", page.address);
    let said = run_client(&document.body, "feed.py", &[&url, token, "crm", "10000"]);
    assert_eq!(said.trim(), "10000 events, 50005000");
}

/// R60: the same for a customer.
#[test]
fn a_client_of_the_portals_document_adds_an_endpoint_once_and_tests_it() {
    let (database, receiver) = (Database::new(), receiver());
    let portal = portal(&database);
    let token = portal.token(Uuid::now_v7(), HOUR, Rights::all());
    let document = Program::new(&portal, &token).document.to_string();
    let server = Receiver::start(move |request, stream| {
        let mut line = request.line.split(' ');
        let (method, target) = (line.next().expect("a method"), line.next().expect("a path"));
        let mut asked = Request::builder().method(method).uri(target);
        for (name, value) in request.headers() {
            asked = asked.header(name, value);
        }
        let asked = asked.body(request.body.clone()).expect("a request");
        let answer = portal.respond(asked, Visitor::unknown(STRANGER.into()));
        let mut text = format!("HTTP/1.1 {}\r\n", answer.status());
        for (name, value) in answer.headers() {
            text += &format!("{name}: {}\r\n", value.to_str().expect("text"));
        }
        text += &format!("content-length: {}\r\n\r\n", answer.body().len());
        std::io::Write::write_all(stream, &[text.as_bytes(), answer.body()].concat())
    });
    let url = format!("http://{}/api/v1", server.address);
    let said = run_client(&document, "portal.py", &[&url, &token, &receiver.url()]);
    assert!(said.contains("'accepted': True"), "{said}");
    assert_eq!(receiver.count(), 1);
    assert_eq!(database.number("SELECT count(*) FROM {o}_endpoint"), 1);
}

/// R60: read by a validator that is independent of this project.
#[test]
fn each_document_is_openapi() {
    let database = Database::new();
    let (pages, portal) = (pages(&database), portal(&database).base("/webhooks"));
    let token = portal.token(Uuid::now_v7(), HOUR, Rights::look());
    for (program, server) in [
        (Program::new(&pages, TOKEN), "/api/v1"),
        (Program::new(&portal, &token), "/webhooks/api/v1"),
    ] {
        assert_eq!(program.document["servers"][0]["url"], server);
        let file = File::new(&program.document.to_string());
        let read = python()
            .args(["-m", "openapi_spec_validator", "--errors", "all"])
            .arg(file.path())
            .output()
            .expect("the validator runs");
        let said = String::from_utf8_lossy(&read.stdout);
        assert!(read.status.success() && said.contains("OK"), "{said}");
    }
}

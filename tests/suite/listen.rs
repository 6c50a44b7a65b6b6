//! `diesel-outbox listen`, as somebody uses it who tries deliveries.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use diesel_outbox::{Backoff, NewMessage};
use serde_json::{Value, json};

use crate::support::{Database, File, Running, end, eventually, finish};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

struct Listening {
    process: Running,
    url: String,
}

impl Listening {
    fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    fn start_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        // The log has both outputs.
        let mut command = Command::new("sh");
        let program = env!("CARGO_BIN_EXE_diesel-outbox");
        let all_to_stderr = r#"exec "$0" "$@" >&2"#;
        command.args(["-c", all_to_stderr, program, "listen", "--port", "0"]);
        command.args(arguments).envs(variables.iter().copied());
        let process = Running::start(command);
        process.wait_for_log("listening on ");
        let log = process.log();
        let (_, after) = log.split_once("listening on ").expect("the line");
        let url = after.split(' ').next().expect("a URL").to_owned();
        Self { process, url }
    }

    /// Ends it. Returns what it has printed.
    fn end(mut self) -> String {
        self.process.signal("INT");
        assert_eq!(self.process.wait().code(), Some(0));
        self.process.log()
    }
}

#[test]
fn it_verifies_prints_and_fails_on_purpose() {
    let database = Database::new();
    let listening = Listening::start(&["--json", "--secret", SECRET, "--answer", "500,503,204"]);
    let mut relay = database.binary(&["run"]);
    relay
        .env("OUTBOX_URL", &listening.url)
        .env("OUTBOX_SECRET", SECRET);
    let relay = Running::start(relay);
    let message = NewMessage::new("order.paid", &json!({ "order_id": 7 })).expect("JSON");
    database.enqueue_message(message.ordering_key("order-7"));
    eventually("the third attempt is accepted", || {
        database.count("delivered") == 1
    });
    drop(relay);
    let stranger = database.relay().url(&listening.url).max_attempts(1);
    let stranger = stranger.start().expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("an unsigned request is refused", || {
        database.count("dead") == 1
    });
    end(&stranger);
    let printed = listening.end();
    let lines = printed.lines().filter(|line| line.starts_with('{'));
    let lines: Vec<Value> = lines
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    let statuses: Vec<&Value> = lines.iter().map(|line| &line["status"]).collect();
    assert_eq!(statuses, [500, 503, 204, 401], "{printed}");
    assert_eq!(lines[2]["attempt"], 3);
    assert_eq!(lines[2]["ordering_key"], "order-7");
    assert_eq!(lines[2]["data"], json!({ "order_id": 7 }));
    assert!(printed.contains("3 events, 0 of them repeated; 0 out of order, 1 refused"));
}

/// Every mode, and the question that an endpoint may be asked first.
#[test]
fn it_reads_each_mode_and_confirms_that_it_wants_events() {
    let database = Database::new();
    let listening = Listening::start(&[]);
    let put = |name: &str, more: &[&str]| {
        let mut command = database.binary(&["endpoint", "put", name, &listening.url]);
        command.args(["--topic", name]).args(more);
        command
            .env("OUTBOX_ENDPOINT_HTTPS_ONLY", "false")
            .env("OUTBOX_ENDPOINT_PUBLIC_ONLY", "false");
        finish(command).code(0);
    };
    for mode in ["binary", "structured", "batched"] {
        put(mode, &["--mode", mode]);
    }
    put("asked", &["--verification", "challenge"]);
    let relay = database.relay().endpoint_threads(4);
    let relay = relay;
    let relay = relay.start().expect("a relay");
    let topics = ["binary", "structured", "batched", "asked"];
    for topic in topics {
        database.enqueue(topic, json!({ "n": 1 }));
    }
    eventually("all are delivered", || database.count("delivered") == 4);
    end(&relay);
    let printed = listening.end();
    for topic in topics {
        assert!(
            printed.contains(&format!("{topic}  {{\"n\":1}}")),
            "{printed}"
        );
    }
    assert!(printed.contains("outbox.verification  "), "{printed}");
}

/// As a receiver that is merely busy: only `Retry-After` would hold back the other messages of the destination.
#[test]
fn a_429_on_purpose_does_not_pause_the_destination() {
    let database = Database::new();
    let listening = Listening::start(&["--answer", "429,204"]);
    let soon = Backoff::Table(vec![Duration::from_millis(10)]);
    let relay = database.relay().url(&listening.url).backoff(soon);
    let relay = relay.start().expect("a relay");
    database.enqueue("order.paid", json!({ "n": 1 }));
    eventually("the second attempt is accepted", || {
        database.count("delivered") == 1
    });
    end(&relay);
    let printed = listening.end();
    assert!(printed.contains("{\"n\":1} -> 429"), "{printed}");
}

#[test]
fn it_verifies_with_the_secrets_of_a_file() {
    let database = Database::new();
    let file = File::new(&format!("{SECRET}\n"));
    let listening = Listening::start_with(&[], &[("OUTBOX_SECRET_FILE", file.path())]);
    let relay = database.relay().url(&listening.url).max_attempts(1);
    let relay = relay.start().expect("a relay");
    database.enqueue("order.paid", json!({}));
    eventually("an unsigned request is refused", || {
        database.count("dead") == 1
    });
    end(&relay);
    assert!(listening.end().contains("1 refused"));
}

/// RFC 9112, 7.1: as .NET sends JSON.
#[test]
fn an_event_in_chunks_is_received() {
    let listening = Listening::start(&["--json"]);
    let address = listening.url.trim_start_matches("http://");
    let address = address.trim_end_matches('/');
    let event = r#"{"specversion":"1.0","id":"1","source":"/","type":"order.paid","data":{"n":7}}"#;
    let (one, other) = event.split_at(30);
    let mut stream = TcpStream::connect(address).expect("connected");
    write!(
        stream,
        "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/cloudevents+json\r\n\
         transfer-encoding: chunked\r\n\r\n{:x}\r\n{one}\r\n",
        one.len()
    )
    .expect("sent");
    write!(stream, "{:x}\r\n{other}\r\n0\r\n\r\n", other.len()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let printed = listening.end();
    assert!(printed.contains(r#""data":{"n":7}"#), "{printed}");
}

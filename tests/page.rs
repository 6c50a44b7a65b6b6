//! The binary with its admin page, and handwritten requests to that page.

#![allow(
    dead_code,
    unreachable_pub,
    reason = "each test binary uses a part of it"
)]

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use crate::support::{PATIENCE, Running};

/// A token of sufficient length.
pub const TOKEN: &str = "a-token-of-32-characters-or-more";

pub struct Page {
    pub process: Running,
    pub address: SocketAddr,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Answer {
    /// The value of the header with this lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(given, _)| *given == name)
            .map(|(_, value)| value)
    }

    /// The cookie from the response, as a browser sends it back.
    pub fn cookie(&self) -> &str {
        let set = self.header("set-cookie").expect("a cookie is set");
        set.split(';').next().expect("a value")
    }

    /// The token that the page's forms send.
    pub fn form_token(&self) -> String {
        let (_, rest) = self
            .body
            .split_once("name=\"form_token\" value=\"")
            .unwrap_or_else(|| panic!("the page has no form: {}", self.body));
        rest.split('"').next().expect("a value").to_owned()
    }
}

impl Page {
    /// Starts a command such as `run` or `admin` with its page on any free port.
    pub fn start(mut command: Command) -> Self {
        command
            .env("OUTBOX_ADMIN_ADDR", "127.0.0.1:0")
            .env("OUTBOX_LOG_FORMAT", "json");
        Self::of(Running::start(command))
    }

    /// The page of a process that has just started.
    pub fn of(process: Running) -> Self {
        process.wait_for_log("the admin page is at");
        let log = process.log();
        let address = log
            .split("the admin page is at http://")
            .nth(1)
            .and_then(|rest| rest.split('/').next())
            .and_then(|address| address.parse().ok())
            .expect("the log says where the page is");
        Self { process, address }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the page listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream
    }

    /// Sends raw bytes and reads the whole response.
    pub fn raw(&self, request: &[u8]) -> Answer {
        let mut stream = self.connect();
        // The server may refuse the request and close the connection before all bytes are written.
        let _ = stream.write_all(request);
        let _ = stream.shutdown(Shutdown::Write);
        read(stream)
    }

    /// Sends a request with these header lines, and adds a Host header if they lack one.
    pub fn request(&self, line: &str, headers: &[&str], body: &str) -> Answer {
        let mut request = format!("{line} HTTP/1.1\r\n");
        let has_host = headers.iter().any(|header| header.starts_with("host:"));
        if !has_host {
            request.push_str(&format!("host: {}\r\n", self.address));
        }
        for header in headers {
            request.push_str(&format!("{header}\r\n"));
        }
        if !body.is_empty() {
            request.push_str(&format!(
                "content-type: application/x-www-form-urlencoded\r\ncontent-length: {}\r\n",
                body.len()
            ));
        }
        self.raw(format!("{request}\r\n{body}").as_bytes())
    }

    pub fn get(&self, path: &str) -> Answer {
        self.request(&format!("GET {path}"), &[], "")
    }

    /// Sends a form as a page of this server does.
    pub fn post(&self, path: &str, cookie: &str, body: &str) -> Answer {
        let origin = format!("origin: http://{}", self.address);
        let cookie = format!("cookie: {cookie}");
        self.request(&format!("POST {path}"), &[&origin, &cookie], body)
    }

    /// Sends JSON as a program on the same machine does. Returns its answer.
    pub fn json(&self, path: &str, body: &serde_json::Value) -> serde_json::Value {
        let body = body.to_string();
        let head = format!(
            "POST /api/v1{path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        let answer = self.raw(format!("{head}{body}").as_bytes());
        serde_json::from_str(&answer.body).expect("JSON")
    }

    /// Sends a DELETE without body, as a program does.
    pub fn delete(&self, path: &str) -> serde_json::Value {
        let answer = self.request(&format!("DELETE /api/v1{path}"), &[], "");
        serde_json::from_str(&answer.body).expect("JSON")
    }

    /// Logs in with the token. Returns the cookie.
    pub fn log_in(&self) -> String {
        let answer = self.post("/login", "", &format!("token={TOKEN}&name=ann"));
        assert_eq!(answer.status, 303, "{answer:?}");
        answer.cookie().to_owned()
    }
}

/// Reads a whole response.
pub fn read(mut stream: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).expect("a complete response");
    let text = String::from_utf8(bytes).expect("UTF-8");
    let (head, body) = text
        .split_once("\r\n\r\n")
        .unwrap_or_else(|| panic!("not a response: {text:?}"));
    let status = head
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok())
        .expect("a status");
    Answer {
        status,
        head: head.to_owned(),
        body: body.to_owned(),
    }
}

/// The limit for a response while other clients are slow.
pub const SOON: Duration = Duration::from_secs(4);

//! What a send makes of receivers on real sockets.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver as Answers, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::form::tests::message;
use super::*;
use crate::dispatch::Pause;

/// Longer than the buffers of both ends of a connection.
const LONG: usize = 30_000_000;
const OK: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";

/// Serves each connection in its own thread, with the number of the connection.
fn listen(serve: impl Fn(usize, TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    let serve = Arc::new(serve);
    std::thread::spawn(move || {
        for (number, stream) in listener.incoming().flatten().enumerate() {
            let serve = Arc::clone(&serve);
            std::thread::spawn(move || serve(number, stream));
        }
    });
    address
}

fn config(address: SocketAddr) -> Config {
    let mut config = Config {
        send_timeout: Duration::from_secs(20),
        ..Config::default()
    };
    let url = format!("http://{address}/");
    config.set("OUTBOX_URL", &url).expect("a URL");
    config
}

fn dispatcher(address: SocketAddr) -> HttpDispatcher {
    HttpDispatcher::new(&config(address)).expect("a dispatcher")
}

/// Reads the head of a request. Returns the length of its body, or `None` at the end of the connection.
fn read_head(stream: &mut impl BufRead) -> Option<usize> {
    let mut length = None;
    loop {
        let mut line = String::new();
        let read = stream.read_line(&mut line).unwrap_or_default();
        let line = line.trim_end().to_lowercase();
        if read == 0 {
            return None;
        }
        if line.is_empty() {
            return Some(length.expect("a length"));
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = Some(value.trim().parse().expect("a number"));
        }
    }
}

fn read_request(stream: &mut impl BufRead) -> Option<()> {
    let length = read_head(stream)?;
    stream.read_exact(&mut vec![0; length]).ok()
}

#[track_caller]
fn assert_delivered(outcome: &Outcome) {
    assert!(matches!(outcome, Outcome::Delivered(_)), "{outcome:?}");
}

/// A receiver that answers each request with `answer`, and a count of its requests.
fn answering(answer: impl Into<Vec<u8>>) -> (SocketAddr, Answers<()>) {
    let answer = answer.into();
    let (sender, requests) = channel();
    let sender = Mutex::new(sender);
    let address = listen(move |_, stream| {
        let mut reader = BufReader::new(&stream);
        while read_request(&mut reader).is_some() {
            lock(&sender).send(()).expect("the test waits");
            (&stream).write_all(&answer).expect("the relay waits");
        }
    });
    (address, requests)
}

#[test]
fn a_message_that_was_accepted_is_delivered_once_whatever_follows_the_status() {
    let headers = |count: usize| "x-a: 1\r\n".repeat(count);
    let long = format!("x-a: {}\r\n", "a".repeat(70_000));
    for (before, fields) in [
        ("HTTP/1.1 100 Continue\r\nx-a: 1\r\n\r\n", String::new()),
        ("", "x-a: 1\r\n folded\r\n".to_owned()),
        ("", "x-a : 1\r\n".to_owned()),
        ("", headers(150)),
        ("", headers(10_000)),
        ("", long),
        ("", "x-a: \u{1}\r\n".to_owned()),
        ("", "content-length: 1\r\n".to_owned()),
    ] {
        let answer = format!("{before}HTTP/1.1 200 OK\r\n{fields}content-length: 2\r\n\r\nok");
        let (address, requests) = answering(answer);
        let dispatcher = dispatcher(address);
        for _ in 0..2 {
            let began = Instant::now();
            assert_delivered(&dispatcher.dispatch(&message("1")));
            assert!(began.elapsed() < Duration::from_secs(10), "{fields:.20}");
        }
        assert_eq!(requests.try_iter().count(), 2, "{fields:.20}");
    }
}

#[test]
fn a_head_that_does_not_end_has_its_status_at_the_timeout() {
    let address = listen(|_, mut stream| {
        read_request(&mut BufReader::new(&stream));
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nx-a: ");
        while stream.write_all(b"a").is_ok() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    let config = Config {
        send_timeout: Duration::from_millis(300),
        ..config(address)
    };
    let dispatcher = HttpDispatcher::new(&config).expect("a dispatcher");
    assert_delivered(&dispatcher.dispatch(&message("1")));
}

/// Answers when the head of a request has arrived, and then does `and_then` with the connection.
fn early(
    answer: &'static [u8],
    and_then: impl Fn(&mut TcpStream) + Send + Sync + 'static,
) -> Outcome {
    let address = listen(move |_, mut stream| {
        read_head(&mut BufReader::with_capacity(1, &stream)).expect("a head");
        stream.write_all(answer).expect("the relay writes");
        and_then(&mut stream);
    });
    let began = Instant::now();
    let outcome = dispatcher(address).dispatch(&message(&"1".repeat(LONG)));
    assert!(began.elapsed() < Duration::from_secs(15), "{outcome:?}");
    outcome
}

/// Keeps the connection open, without reading.
fn hold(_: &mut TcpStream) {
    std::thread::sleep(Duration::from_secs(30));
}

fn read_all(stream: &mut TcpStream) {
    let _ = stream.read_to_end(&mut Vec::new());
}

#[test]
fn an_answer_before_the_body_was_read_counts() {
    const TOO_LARGE: &[u8] = b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n";
    const BUSY: &[u8] = b"HTTP/1.1 503 Busy\r\nretry-after: 30.5\r\n\r\n";
    // Closing a connection with unread bytes resets it.
    for and_then in [|_: &mut TcpStream| (), hold, read_all] {
        let outcome = early(TOO_LARGE, and_then);
        let status = |failure: &Failure| failure.response.status;
        assert!(
            matches!(&outcome, Outcome::Dead(failure) if status(failure) == Some(413)),
            "{outcome:?}"
        );
        let outcome = early(BUSY, and_then);
        let wait = Some(Pause::For(Duration::from_secs(31)));
        assert!(
            matches!(&outcome, Outcome::Retry(failure) if failure.pause == wait),
            "{outcome:?}"
        );
    }
}

#[test]
fn a_receiver_that_reads_after_an_interim_response_gets_the_whole_request() {
    let interim = b"HTTP/1.1 100 Continue\r\nx-a: 1\r\n\r\n";
    let outcome = early(interim, |stream| {
        std::thread::sleep(Duration::from_millis(300));
        // The beginning of the body may have been read with the head.
        let mut rest = vec![0; LONG - 1];
        stream.read_exact(&mut rest).expect("the body");
        stream.write_all(OK).expect("the relay waits");
        read_all(stream);
    });
    assert_delivered(&outcome);
}

/// A receiver that reads a second request on a connection, or only its head, and closes it. Reports the connection of
/// each request.
fn closing(reads_whole: bool) -> (SocketAddr, Answers<usize>) {
    let (sender, requests): (Sender<usize>, _) = channel();
    let sender = Mutex::new(sender);
    let address = listen(move |number, stream| {
        // Closing a connection with unread bytes resets it.
        let mut reader = BufReader::with_capacity(1, &stream);
        for is_first in [true, false] {
            let read = match is_first || reads_whole {
                true => read_request(&mut reader),
                false => read_head(&mut reader).map(drop),
            };
            if read.is_none() {
                return;
            }
            lock(&sender).send(number).expect("the test waits");
            if is_first {
                (&stream).write_all(OK).expect("the relay waits");
            }
        }
    });
    (address, requests)
}

#[test]
fn a_request_that_a_reused_connection_loses_is_sent_once_more_and_then_connections_are_not_reused()
{
    for reads_whole in [true, false] {
        let (address, requests) = closing(reads_whole);
        let dispatcher = dispatcher(address);
        for _ in 0..6 {
            assert_delivered(&dispatcher.dispatch(&message("1")));
        }
        let connections: Vec<_> = requests.try_iter().collect();
        assert_eq!(connections, [0, 0, 1, 1, 2, 3, 4, 5]);
    }
}

#[test]
fn a_request_that_a_new_connection_loses_or_that_has_part_of_an_answer_is_not_sent_again() {
    for part in ["", "HTTP"] {
        let (sender, requests) = channel();
        let sender = Mutex::new(sender);
        let address = listen(move |number, stream| {
            let mut reader = BufReader::new(&stream);
            // The first connection works once.
            if number == 0 {
                read_request(&mut reader);
                (&stream).write_all(OK).expect("the relay waits");
            }
            read_request(&mut reader);
            lock(&sender).send(()).expect("the test waits");
            let _ = (&stream).write_all(part.as_bytes());
        });
        let dispatcher = dispatcher(address);
        assert_delivered(&dispatcher.dispatch(&message("1")));
        let outcome = dispatcher.dispatch(&message("1"));
        let is_lost = |failure: &Failure| failure.code == ReasonCode::ConnectionLost;
        assert!(
            matches!(&outcome, Outcome::Retry(failure) if is_lost(failure)),
            "{outcome:?}"
        );
        let expected = if part.is_empty() { 2 } else { 1 };
        assert_eq!(requests.try_iter().count(), expected, "{part:?}");
    }
}

/// Waits until the dispatcher closes the connection of a receiver that behaves like `serve` after its response.
fn closes(answer: &'static [u8], serve: fn(&TcpStream)) -> Duration {
    let (sender, closed) = channel();
    let sender = Mutex::new(sender);
    let address = listen(move |_, stream| {
        read_request(&mut BufReader::new(&stream)).expect("a request");
        (&stream).write_all(answer).expect("the relay waits");
        serve(&stream);
        assert_eq!((&stream).read(&mut [0]).expect("an orderly end"), 0);
        lock(&sender).send(()).expect("the test waits");
    });
    let dispatcher = dispatcher(address);
    assert_delivered(&dispatcher.dispatch(&message("1")));
    let began = Instant::now();
    while closed.recv_timeout(Duration::from_millis(10)).is_err() {
        assert!(began.elapsed() < Duration::from_secs(12), "still open");
        close_idle();
    }
    began.elapsed()
}

#[test]
fn idle_connections_that_the_receiver_has_closed_are_closed() {
    closes(OK, |stream| {
        stream.shutdown(Shutdown::Write).expect("a connection");
    });
}

#[test]
fn an_idle_connection_is_closed_before_the_receiver_would_close_it() {
    let answer = b"HTTP/1.1 200 OK\r\nkeep-alive: timeout=2\r\ncontent-length: 0\r\n\r\n";
    let after = closes(answer, |_| ());
    assert!(after >= Duration::from_millis(900), "{after:?}");
}

/// The receiver has moved, and its old address still works. Its connection is never idle for long.
#[test]
fn a_name_that_moves_is_followed_under_load() {
    let ((old, at_old), (new, at_new)) = (answering(OK), answering(OK));
    let has_moved = Arc::new(AtomicBool::new(false));
    let moved = Arc::clone(&has_moved);
    let lookup = move |_: &str, _| {
        Ok(vec![if moved.load(Ordering::SeqCst) {
            new
        } else {
            old
        }])
    };
    let mut config = config(old);
    (config.set("OUTBOX_URL", "http://moves.example/")).expect("a URL");
    let dispatcher = HttpDispatcher::with_lookup(&config, lookup).expect("a dispatcher");
    assert_delivered(&dispatcher.dispatch(&message("1")));
    assert_eq!(at_old.try_iter().count(), 1);
    has_moved.store(true, Ordering::SeqCst);
    let began = Instant::now();
    // Addresses are kept for 10 s.
    while at_new.try_recv().is_err() {
        assert!(began.elapsed() < Duration::from_secs(30), "not followed");
        dispatcher.places[0]
            .target
            .lines()
            .grow_older(Duration::from_secs(30));
        assert_delivered(&dispatcher.dispatch(&message("1")));
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn the_address_that_worked_is_tried_first() {
    let good = listen(|_, stream| {
        read_request(&mut BufReader::new(&stream)).expect("a request");
        let answer = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        (&stream).write_all(answer).expect("the relay waits");
    });
    let deaf = super::socket::tests::Deaf::new();
    let addresses = vec![deaf.address(), good];
    let mut config = config(good);
    (config.set("OUTBOX_URL", "http://two.example/")).expect("a URL");
    let lookup = move |_: &str, _| Ok(addresses.clone());
    let dispatcher = HttpDispatcher::with_lookup(&config, lookup).expect("a dispatcher");
    let times = [(); 4].map(|()| {
        let began = Instant::now();
        assert_delivered(&dispatcher.dispatch(&message("1")));
        began.elapsed()
    });
    let wait = Duration::from_millis(250);
    assert!(
        times[0] >= wait && times[0] < Duration::from_secs(5),
        "{times:?}"
    );
    assert!(times[1..].iter().min() < Some(&wait), "{times:?}");
}

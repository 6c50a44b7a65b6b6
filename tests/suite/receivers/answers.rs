//! Answers that are odd, endless or cut, and what they mean for the message.

use super::*;

// --- Answers that are not HTTP ------------------------------------------------------------

#[test]
fn an_answer_that_is_not_http_is_a_protocol_failure() {
    is_dead_lettered_for("PROTOCOL", |stream| {
        stream.write_all(b"220 mail.example ESMTP ready\r\n\r\n")
    });
}

#[test]
fn an_answer_as_of_http_0_9_is_a_protocol_failure() {
    is_dead_lettered_for("PROTOCOL", |stream| {
        stream.write_all(b"<html>ok</html>\n")?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

// --- Answers with 200 and something wrong with the rest of the head ------------------------

/// Sends a message to a receiver that writes `answer` and closes the connection, and then another message.
#[track_caller]
fn is_delivered_by(answer: impl Into<Vec<u8>>) {
    let answer = answer.into();
    is_delivered(move |stream| {
        stream.write_all(&answer)?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn a_head_that_ends_in_the_middle_is_a_delivery() {
    is_delivered_by("HTTP/1.1 200 OK\r\ncontent-le");
}

#[test]
fn odd_lines_in_a_head_are_a_delivery() {
    let lines = "x-a: 1\r\n folded\r\nx-b : 2\r\nx-c: \u{1}\r\nno colon\r\n";
    is_delivered_by(format!(
        "HTTP/1.1 200 OK\r\n{lines}content-length: 2\r\n\r\nok"
    ));
}

#[test]
fn many_headers_or_a_long_one_are_a_delivery() {
    let many = "x-a: 1\r\n".repeat(150);
    let long = format!("x-b: {}\r\n", "b".repeat(70_000));
    is_delivered_by(format!(
        "HTTP/1.1 200 OK\r\n{many}{long}content-length: 2\r\n\r\nok"
    ));
}

#[test]
fn an_interim_answer_with_headers_is_passed_over() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 100 Continue\r\nx-a: 1\r\n\r\n")?;
        stream.write_all(&status(200))
    });
}

#[test]
fn endless_headers_are_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\n")?;
        loop {
            stream.write_all(b"x-and-so-on: and so on and so on and so on\r\n")?;
        }
    });
}

#[test]
fn one_endless_header_is_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\nx-a: ")?;
        loop {
            stream.write_all(&[b'a'; 4096])?;
        }
    });
}

// --- Answers with 200 and something wrong with the body -----------------------------------

const TEN_MEGABYTES: usize = 10_000_000;

#[test]
fn an_answer_of_ten_megabytes_with_a_length_is_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(
            format!("HTTP/1.1 200 OK\r\ncontent-length: {TEN_MEGABYTES}\r\n\r\n").as_bytes(),
        )?;
        stream.write_all(&vec![b'x'; TEN_MEGABYTES])
    });
}

#[test]
fn an_answer_of_ten_megabytes_without_a_length_is_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
        stream.write_all(&vec![b'x'; TEN_MEGABYTES])?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn of_an_endless_body_a_bounded_part_is_read_and_kept() {
    let database = Database::new();
    let (sender, written) = mpsc::channel();
    let sender = Mutex::new(sender);
    let receiver = Receiver::start(move |_, stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")?;
        let chunk = [b"10000\r\n".as_slice(), &[b'x'; 0x10000], b"\r\n"].concat();
        let mut count = 0;
        while stream.write_all(&chunk).is_ok() {
            count += chunk.len();
        }
        let sender = sender.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = sender.send(count);
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
    // Long enough for the relay, not its timeout, to end the connection.
    let relay = database
        .relay()
        .send_timeout(Duration::from_secs(100))
        .lease(Duration::from_secs(300))
        .url(&receiver.url())
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    let written = written
        .recv_timeout(Duration::from_secs(30))
        .expect("the relay has closed the connection");
    // At most the system's buffers.
    assert!(written < 32 * 1024 * 1024, "{written} bytes were taken");
    assert_eq!(
        database.number("SELECT octet_length(response) FROM {o}_ledger"),
        2048
    );
    end(&relay);
}

#[test]
fn a_content_length_that_is_too_long_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nok")?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn a_content_length_that_is_too_long_on_an_open_connection_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nok")?;
        until_it_goes(stream)
    });
}

#[test]
fn a_content_length_that_is_too_short_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok, thanks")
    });
}

#[test]
fn a_body_in_wrong_chunks_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nwhat?\r\nok\r\n0\r\n\r\n",
        )
    });
}

#[test]
fn a_body_that_is_not_utf_8_does_not_matter() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n\xff\xfe\0\x1b\x80")
    });
}

#[test]
fn a_204_is_a_delivery() {
    is_delivered(|stream| stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n"));
}

#[test]
fn an_answer_of_http_1_0_is_a_delivery() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.0 200 OK\r\n\r\nok")?;
        Err(std::io::ErrorKind::ConnectionAborted.into())
    });
}

#[test]
fn interim_answers_before_the_200_are_passed_over() {
    is_delivered(|stream| {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        stream.write_all(b"HTTP/1.1 103 Early Hints\r\nlink: </style.css>; rel=preload\r\n\r\n")?;
        stream.write_all(&status(200))
    });
}

#[test]
fn an_interim_answer_and_nothing_after_it_is_no_delivery() {
    is_dead_lettered_for("TIMEOUT", |stream| {
        stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        until_it_goes(stream)
    });
}

/// Responses that are nearly HTTP, made from a seed: parts of a real response, cut, repeated, swapped and mixed with
/// noise.
fn odd_answer(seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let parts: [&[u8]; 16] = [
        b"HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 429 Slow\r\n",
        b"HTTP/1.0 503 \r\n",
        b"HTTP/9.9 99999 ?\r\n",
        b"retry-after: 99999999999999999999\r\n",
        b"retry-after: Sun, 06 Nov 9994 08:49:37 GMT\r\n",
        b"retry-after: \xff\xfe\r\n",
        b"content-length: 18446744073709551616\r\n",
        b"content-length: 5\r\n",
        b"transfer-encoding: chunked\r\n",
        b"content-encoding: gzip\r\n",
        b"fffffffffffffffff\r\n",
        b"5\r\nhello\r\n0\r\n\r\n",
        b"\r\n",
        b": \r\n",
        b"\0\x1b[2J\x7f\r\r\n\n",
    ];
    let mut answer = Vec::new();
    if random.bool() {
        // Starts with a valid part.
        answer.extend_from_slice(parts[random.usize(..3)]);
    }
    for _ in 0..random.usize(0..8) {
        let part = parts[random.usize(..parts.len())];
        let end = if random.u8(..4) == 0 {
            random.usize(..=part.len())
        } else {
            part.len()
        };
        answer.extend_from_slice(&part[..end]);
        if random.u8(..8) == 0 {
            answer.extend(std::iter::repeat_with(|| random.u8(..)).take(20));
        }
    }
    if random.bool() {
        answer.extend_from_slice(b"\r\n\r\n\x1b[2J\0 body");
    }
    answer
}

#[test]
fn any_bytes_that_a_receiver_answers_have_an_outcome() {
    const ANSWERS: usize = 300;
    let database = Database::new();
    let receiver = Receiver::start(|request, stream| {
        let seed = request.json()["n"].as_u64().expect("a number");
        stream.write_all(&odd_answer(seed))?;
        // Closing the connection ends the response.
        Err(std::io::ErrorKind::Other.into())
    });
    database.enqueue_many(ANSWERS);
    let mut destination = Destination::new("odd", &receiver.url()).expect("a URL");
    destination.policy.breaker = None;
    destination.policy.retry_after_cap = Duration::from_millis(10);
    let relay = relay(&database)
        .max_attempts(1)
        .destination(destination)
        .route("*", "odd")
        .start()
        .expect("a relay");
    eventually("all messages are settled", || {
        usize::try_from(database.count("delivered") + database.count("dead")) == Ok(ANSWERS)
    });
    end(&relay);
    // The responses are of many kinds, and what is stored of them has no control characters.
    assert!(database.count("delivered") > 0 && database.count("dead") > 0);
    assert!(database.number("SELECT count(DISTINCT reason) FROM {o}_dead") >= 3);
    assert_eq!(
        database.number(
            "SELECT count(*) FROM {o}_ledger
              WHERE coalesce(response, '') || coalesce(error, '') ~ '[\\x01-\\x08\\x0b-\\x1f\\x7f]'"
        ),
        0
    );
}

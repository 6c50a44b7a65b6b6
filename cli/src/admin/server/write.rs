//! Writes a response within a limit of time.

use std::io::{ErrorKind, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::Response;

/// Writes a response; without its body if the request was HEAD.
pub(super) fn write(
    response: &Response,
    stream: &mut TcpStream,
    is_head: bool,
    deadline: Instant,
) -> std::io::Result<()> {
    let body = response.body();
    let mut answer = format!(
        "HTTP/1.1 {}\r\ncontent-length: {}\r\nconnection: close\r\n",
        response.status(),
        body.len()
    )
    .into_bytes();
    for (name, value) in response.headers() {
        answer.extend_from_slice(name.as_str().as_bytes());
        answer.extend_from_slice(b": ");
        answer.extend_from_slice(value.as_bytes());
        answer.extend_from_slice(b"\r\n");
    }
    answer.extend_from_slice(b"\r\n");
    if !is_head {
        answer.extend_from_slice(body);
    }
    let mut rest = answer.as_slice();
    while !rest.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        stream.set_write_timeout(Some(left))?;
        match stream.write(rest) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(count) => rest = &rest[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

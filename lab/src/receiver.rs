//! A small HTTP receiver, for `demo` and `bench`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;

use anyhow::{Context, Result, bail};

use diesel_outbox_cli::number::whole;
use diesel_outbox_cli::output;

/// Options of `receive`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Port to listen on; 0 for any free port
    #[arg(long, default_value_t = 0)]
    port: u16,
    /// HTTP status of every response
    #[arg(long, default_value_t = 200, value_parser = whole(200..=599_u16))]
    status: u16,
}

/// The most headers of a request.
const MOST_HEADERS: usize = 64;
/// The most bytes of a request head.
const MOST_HEAD_BYTES: usize = 64 * 1024;
/// The most bytes of a request body.
const MOST_BODY_BYTES: usize = 16 * 1024 * 1024;

/// The headers and the body of a request.
pub(crate) struct Received {
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Received {
    /// The value of a header. `name` must be in lower case.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }
}

/// Listens on loopback until the process ends. A thread for each connection responds to each request with the status
/// that `answer` returns.
pub(crate) fn start(
    port: u16,
    answer: impl Fn(&Received) -> u16 + Send + Sync + 'static,
) -> Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", port)).context("cannot listen")?;
    let address = listener.local_addr()?;
    let answer = Arc::new(answer);
    std::thread::Builder::new()
        .name("receiver".to_owned())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                let answer = Arc::clone(&answer);
                let spawned = std::thread::Builder::new()
                    .name("receive".to_owned())
                    .spawn(move || {
                        if let Err(error) = serve(stream, &*answer) {
                            log::debug!(event = "receiver_failed"; "the receiver cannot respond: {error:#}");
                        }
                    });
                if let Err(error) = spawned {
                    log::error!(event = "receiver_failed"; "the receiver cannot start a thread: {error}");
                }
            }
        })?;
    Ok(address)
}

fn serve(stream: TcpStream, answer: &(impl Fn(&Received) -> u16 + ?Sized)) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut writer = stream.try_clone()?;
    let mut reader = BufReader::with_capacity(16 * 1024, stream);
    let mut head = Vec::new();
    while let Some(request) = read(&mut reader, &mut head)? {
        let status = answer(&request);
        let reason = if status == 200 { "OK" } else { "No" };
        writer.write_all(
            format!("HTTP/1.1 {status} {reason}\r\ncontent-length: 0\r\n\r\n").as_bytes(),
        )?;
    }
    Ok(())
}

fn read(reader: &mut BufReader<TcpStream>, head: &mut Vec<u8>) -> Result<Option<Received>> {
    head.clear();
    loop {
        let before = head.len();
        let read = reader
            .by_ref()
            .take(MOST_HEAD_BYTES as u64)
            .read_until(b'\n', head)?;
        if read == 0 {
            return Ok(None);
        }
        if head.len() - before <= 2 && head.ends_with(b"\n") && before > 0 {
            break;
        }
        if head.len() > MOST_HEAD_BYTES {
            bail!("the request head is too large");
        }
    }
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut request = httparse::Request::new(&mut headers);
    request.parse(head)?;
    let headers: Vec<(String, String)> = request
        .headers
        .iter()
        .map(|header| {
            let value = String::from_utf8_lossy(header.value).into_owned();
            (header.name.to_ascii_lowercase(), value)
        })
        .collect();
    let length: usize = headers
        .iter()
        .find(|(name, _)| name == "content-length")
        .map_or(Ok(0), |(_, value)| value.parse())?;
    if length > MOST_BODY_BYTES {
        bail!("the request body is too large");
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    Ok(Some(Received { headers, body }))
}

/// Responds to every request with one status, and prints the URL to standard output.
pub(crate) fn run(options: &Options) -> Result<()> {
    let status = options.status;
    let address = start(options.port, move |_| status)?;
    output::line(format!("http://{address}/"))?;
    // The parent process closes standard input to end this process.
    std::io::copy(&mut std::io::stdin().lock(), &mut std::io::sink())?;
    Ok(())
}

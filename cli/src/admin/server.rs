//! A small HTTP/1.1 server for a page with few users: one request per connection, one thread per connection, and a
//! limit on everything.
//!
//! Existing libraries either bring an async runtime or let a client use unlimited time and memory. `httparse` parses
//! the requests.

mod read;
mod write;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use crossbeam_channel::{RecvTimeoutError, Sender, bounded, unbounded};
use diesel_outbox_pages::plain;
use http::{Method, StatusCode};

use crate::threads::spawn;

pub(crate) type Request = http::Request<Vec<u8>>;
pub(crate) type Response = http::Response<Vec<u8>>;

/// Time to receive a whole request.
const READ_TIME: Duration = Duration::from_secs(5);
/// Time to build a response. A read exceeds it only if the database hangs and ignores its own timeouts; a change
/// of many messages may take much longer.
const LOOK_TIME: Duration = Duration::from_secs(15);
const CHANGE_TIME: Duration = Duration::from_secs(300);
/// Time to send a whole response.
const WRITE_TIME: Duration = Duration::from_secs(10);
/// Connections at the same time. One more closes the connection that has waited longest for its client.
const MOST_CONNECTIONS: usize = 256;
/// The pause after a failed accept, for example without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Turns a request, and the address of its client, into a response.
pub(crate) type Handler = dyn Fn(Request, IpAddr) -> Reply + Send + Sync;

/// What answers a request.
pub(crate) enum Reply {
    Now(Response),
    Later(Later),
}

impl From<Response> for Reply {
    fn from(response: Response) -> Self {
        Self::Now(response)
    }
}

/// A response that is not there yet: its connection waits without a thread.
pub(crate) struct Later {
    /// Calls this once when the response can be made, or says why nobody waits.
    pub(crate) wait: Box<dyn FnOnce(Wake) -> Option<Response> + Send>,
    /// Makes it.
    pub(crate) finish: Box<dyn FnOnce() -> Response + Send>,
}

pub(crate) type Wake = Box<dyn FnOnce() + Send>;

/// Threads that answer those who have waited. Many wake at once, and the database has a few connections for them.
const ANSWERING: usize = 2;

/// A connection whose response can be made now.
struct Woken {
    stream: TcpStream,
    is_head: bool,
    finish: Box<dyn FnOnce() -> Response + Send>,
}

impl Woken {
    /// A client that reads slowly holds up no other: each response has a thread of its own.
    fn answer(self) {
        // The thread has others to answer.
        let made = catch_unwind(AssertUnwindSafe(self.finish));
        let (response, is_head) = (made.unwrap_or_else(|_| panicked()), self.is_head);
        let mut stream = self.stream;
        let spawned = std::thread::Builder::new()
            .name("feeds-write".to_owned())
            .spawn(move || write(&response, &mut stream, is_head));
        if let Err(error) = spawned {
            log::warn!(event = "admin_connection_failed", error:% = error; "admin page: a connection failed: cannot start a thread: {error}");
        }
    }
}

/// The way to the threads that answer those who have waited.
#[derive(Clone)]
struct Waked(Sender<Woken>);

impl Waked {
    fn start() -> Result<Self> {
        let (woken, all) = unbounded::<Woken>();
        for number in 0..ANSWERING {
            let all = all.clone();
            spawn(format!("feeds-answer-{number}"), move || {
                for one in all {
                    one.answer();
                }
            })?;
        }
        Ok(Self(woken))
    }

    /// Lets the connection wait. A response: it does not.
    fn wait(&self, later: Later, stream: TcpStream, is_head: bool) -> Option<Response> {
        let (woken, finish) = (self.0.clone(), later.finish);
        let one = Woken {
            stream,
            is_head,
            finish,
        };
        (later.wait)(Box::new(move || {
            // The threads end with the server.
            let _ = woken.send(one);
        }))
    }
}

/// A listening server. Dropping it closes the listener; requests in progress run to their end.
pub(crate) struct Server {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    accepting: Option<JoinHandle<()>>,
}

impl Server {
    /// `most_bytes`: the largest body of a request.
    pub(crate) fn start(
        listener: TcpListener,
        handler: Arc<Handler>,
        most_bytes: usize,
    ) -> Result<Self> {
        let address = listener
            .local_addr()
            .context("cannot read the address of the listener")?;
        let stopping = Arc::new(AtomicBool::new(false));
        let is_stopping = Arc::clone(&stopping);
        let waked = Waked::start()?;
        let accepting = spawn("admin-accept", move || {
            accept(&listener, &is_stopping, &handler, most_bytes, &waked)
        })?;
        Ok(Self {
            address,
            stopping,
            accepting: Some(accepting),
        })
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Connect to wake the thread from `accept`. If that fails, the thread ends with the process.
        let mut to = self.address;
        if to.ip().is_unspecified() {
            to.set_ip(match to {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        let is_woken = TcpStream::connect_timeout(&to, Duration::from_secs(1)).is_ok();
        if let Some(accepting) = self.accepting.take()
            && is_woken
            && accepting.join().is_err()
        {
            log::error!(event = "admin_panic"; "admin page: the thread that accepts connections panicked");
        }
    }
}

/// Open connections. Those that wait for the client to send its request or read its response are queued in the order
/// in which they started to wait.
#[derive(Default)]
struct Connections {
    count: usize,
    waiting: VecDeque<(u64, TcpStream)>,
}

impl Connections {
    fn forget(&mut self, number: u64) {
        self.waiting.retain(|(waiting, _)| *waiting != number);
    }
}

type Shared = Arc<Mutex<Connections>>;

fn lock(connections: &Shared) -> std::sync::MutexGuard<'_, Connections> {
    connections.lock().unwrap_or_else(PoisonError::into_inner)
}

fn accept(
    listener: &TcpListener,
    stopping: &AtomicBool,
    handler: &Arc<Handler>,
    most_bytes: usize,
    waked: &Waked,
) {
    let connections = Shared::default();
    let mut number = 0;
    for stream in listener.incoming() {
        if stopping.load(Ordering::Acquire) {
            return;
        }
        let stream = match stream {
            Ok(stream) => stream,
            Err(error) => {
                log::warn!(event = "admin_accept_failed", error:% = error; "admin page: cannot accept a connection: {error}");
                std::thread::sleep(ACCEPT_PAUSE);
                continue;
            }
        };
        number += 1;
        if let Err(error) = begin(stream, number, &connections, (handler, waked), most_bytes) {
            log::warn!(event = "admin_connection_failed", error:% = format!("{error:#}"); "admin page: a connection failed: {error:#}");
        }
    }
}

/// Serves a connection on its own thread. At the limit, closes the connection that has waited longest.
fn begin(
    stream: TcpStream,
    number: u64,
    connections: &Shared,
    (handler, waked): (&Arc<Handler>, &Waked),
    most_bytes: usize,
) -> Result<()> {
    let mut all = lock(connections);
    if all.count >= MOST_CONNECTIONS {
        let Some((_, slowest)) = all.waiting.pop_front() else {
            // No connection waits for its client, so none can be closed: drop the new one.
            return Ok(());
        };
        // The client may already have closed it.
        let _ = slowest.shutdown(Shutdown::Both);
    }
    all.count += 1;
    let again = stream.try_clone().map(|again| (number, again));
    let spawned = again.and_then(|again| {
        all.waiting.push_back(again);
        let (connections, handler) = (Arc::clone(connections), Arc::clone(handler));
        let waked = waked.clone();
        std::thread::Builder::new()
            .name(format!("admin-{number}"))
            .spawn(move || {
                let _guard = Counted(Arc::clone(&connections), number);
                serve(stream, number, &connections, (&handler, &waked), most_bytes);
            })
    });
    if spawned.is_err() {
        all.count -= 1;
        all.forget(number);
    }
    drop(all);
    spawned.map(drop).context("cannot start a thread")
}

/// Removes the connection from the list when its thread ends, even by a panic.
struct Counted(Shared, u64);

impl Drop for Counted {
    fn drop(&mut self) {
        let mut all = lock(&self.0);
        all.count -= 1;
        all.forget(self.1);
    }
}

/// Runs the handler on its own thread and returns its response. A handler that takes too long is left behind, so
/// that the client always gets a response.
fn answer(request: Request, peer: IpAddr, number: u64, handler: &Arc<Handler>) -> Reply {
    let limit = match *request.method() {
        Method::POST => CHANGE_TIME,
        _ => LOOK_TIME,
    };
    let (done, answers) = bounded(1);
    let handler = Arc::clone(handler);
    let spawned = std::thread::Builder::new()
        .name(format!("admin-{number}-answer"))
        .spawn(move || {
            // The receiver is gone after a timeout.
            let _ = done.send(handler(request, peer));
        });
    if let Err(error) = spawned {
        let reason = format!("cannot start a thread: {error}\n");
        return plain(StatusCode::INTERNAL_SERVER_ERROR, reason).into();
    }
    match answers.recv_timeout(limit) {
        Ok(response) => response,
        Err(RecvTimeoutError::Timeout) => {
            log::warn!(event = "admin_answer_late"; "admin page: no answer from the database within {} s", limit.as_secs());
            let late = "no response in time: the database may hang, and the request may still take effect\n";
            plain(StatusCode::SERVICE_UNAVAILABLE, late).into()
        }
        Err(RecvTimeoutError::Disconnected) => panicked().into(),
    }
}

fn panicked() -> Response {
    log::error!(event = "admin_panic"; "admin page: a request handler panicked");
    let why = "internal error in the admin page: see the log\n";
    plain(StatusCode::INTERNAL_SERVER_ERROR, why)
}

fn serve(
    mut stream: TcpStream,
    number: u64,
    connections: &Shared,
    (handler, waked): (&Arc<Handler>, &Waked),
    most_bytes: usize,
) {
    let peer = stream
        .peer_addr()
        .map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |peer| peer.ip());
    let read = read::read(&mut stream, Instant::now() + READ_TIME, most_bytes);
    lock(connections).forget(number);
    let (reply, is_head) = match read {
        Ok(Some(request)) => {
            let is_head = request.method() == Method::HEAD;
            (answer(request, peer, number, handler), is_head)
        }
        // The client connected without sending a request, or was closed.
        Ok(None) => return,
        Err(refused) => (Response::from(refused).into(), false),
    };
    let response = match (reply, stream.try_clone()) {
        (Reply::Now(response), _) => response,
        (Reply::Later(later), Ok(again)) => match waked.wait(later, again, is_head) {
            None => return,
            Some(response) => response,
        },
        (Reply::Later(_), Err(error)) => {
            plain(StatusCode::SERVICE_UNAVAILABLE, format!("{error}\n"))
        }
    };
    if let Ok(again) = stream.try_clone() {
        lock(connections).waiting.push_back((number, again));
    }
    write(&response, &mut stream, is_head);
}

/// Sends a response, and closes the connection.
fn write(response: &Response, stream: &mut TcpStream, is_head: bool) {
    let deadline = Instant::now() + WRITE_TIME;
    let written = write::write(response, stream, is_head, deadline);
    if let Err(error) = written {
        log::debug!(event = "admin_answer_lost", error:% = error; "admin page: cannot send a response: {error}");
    }
    // Unread input would reset the connection and lose the response, so drain it. The client may be gone.
    let _ = stream.shutdown(Shutdown::Write);
    read::drain(stream);
}

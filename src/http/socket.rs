//! The sockets of connections.
//!
//! ureq's own socket connects to one address after another, loses a response that arrives before the whole request is
//! written, and makes three system calls to see whether a connection is open.

use std::io::{self, ErrorKind, Read};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::sockopt::socket_error;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::net::{connect, recv, send, socket_with};
use ureq::Error;
use ureq::unversioned::transport::{Buffers, LazyBuffers, NextTimeout, Transport};

use super::shortage::Shortage;
use super::sockets::Permit;
use crate::dispatch::fence;
use crate::log;

/// How long to wait for an address before the next is tried as well (RFC 8305, 5).
const NEXT_ADDRESS_AFTER: Duration = Duration::from_millis(250);

/// The most addresses of a name that are tried at the same time.
const MOST_TRIES: usize = 3;

/// How long an address is tried before it makes room for another: the first packet is repeated after 1 s (RFC 6298, 2).
const MAKES_ROOM_AFTER: Duration = Duration::from_millis(1250);

/// How often a waiting send looks whether it must end.
const LOOK: Duration = Duration::from_secs(1);

/// The send was ended, because another relay may send the message.
#[derive(Debug, thiserror::Error)]
#[error(
    "the relay has not seen its lease for too long, and closed the connection: another relay may send the message"
)]
pub(super) struct Closed;

/// A connection to a receiver or a proxy.
#[derive(Debug)]
pub(super) struct ReceiverSocket {
    stream: Arc<TcpStream>,
    buffers: LazyBuffers,
    read_timeout: Option<Duration>,
    /// The bytes of the output that a write has sent before it was [`Stalled`].
    sent: usize,
}

/// A write waits for room, and input has arrived: perhaps a response. A repeated write continues.
#[derive(Debug, thiserror::Error)]
#[error("input has arrived before the output was written")]
pub(super) struct Stalled;

impl ReceiverSocket {
    pub(super) fn new(stream: Arc<TcpStream>, buffers: LazyBuffers) -> Self {
        Self {
            stream,
            buffers,
            read_timeout: None,
            sent: 0,
        }
    }

    fn send(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let mut until = None;
        while self.sent < amount {
            next_look()?;
            let output = &self.buffers.output()[self.sent..amount];
            match send(&*self.stream, output, SendFlags::DONTWAIT | NO_SIGNAL) {
                Ok(sent) => self.sent += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let until = until.get_or_insert_with(|| deadline(timeout));
                    self.wait_for_room(*until, timeout)?;
                }
                Err(error) => return Err(io::Error::from(error).into()),
            }
        }
        Ok(())
    }

    fn wait_for_room(&self, until: Option<Instant>, timeout: NextTimeout) -> Result<(), Error> {
        let mut fds = [PollFd::new(&*self.stream, PollFlags::OUT | PollFlags::IN)];
        let look = next_look()?.map(|look| Instant::now() + look);
        poll_until(&mut fds, earlier(until, look))?;
        let events = fds[0].revents();
        if events.intersects(PollFlags::OUT | PollFlags::ERR | PollFlags::HUP) {
            return Ok(());
        }
        if events.contains(PollFlags::IN) {
            return Err(Error::Other(Box::new(Stalled)));
        }
        match until.is_some_and(|until| until <= Instant::now()) {
            true => Err(Error::Timeout(timeout.reason)),
            false => Ok(()),
        }
    }

    fn set_read_timeout(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout != self.read_timeout {
            self.stream.set_read_timeout(timeout)?;
            self.read_timeout = timeout;
        }
        Ok(())
    }
}

impl Transport for ReceiverSocket {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        let result = self.send(amount, timeout);
        let is_stalled = matches!(&result, Err(Error::Other(inner)) if inner.is::<Stalled>());
        if !is_stalled {
            self.sent = 0;
        }
        result
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        if timeout.after.is_zero() {
            return Err(Error::Timeout(timeout.reason));
        }
        let until = deadline(timeout);
        let mut left = until.map(|_| *timeout.after);
        loop {
            self.set_read_timeout(earlier(left, next_look()?))?;
            let input = self.buffers.input_append_buf();
            match (&*self.stream).read(input) {
                Ok(amount) => {
                    self.buffers.input_appended(amount);
                    return Ok(amount > 0);
                }
                // A suspended process is interrupted, too.
                Err(error)
                    if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) =>
                {
                    left = until.map(|until| until.saturating_duration_since(Instant::now()));
                    if left.is_some_and(|left| left.is_zero()) {
                        return Err(Error::Timeout(timeout.reason));
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn is_open(&mut self) -> bool {
        is_quiet(&self.stream)
    }
}

#[cfg(not(target_vendor = "apple"))]
const NO_SIGNAL: SendFlags = SendFlags::NOSIGNAL;
/// Rust programs ignore the signal.
#[cfg(target_vendor = "apple")]
const NO_SIGNAL: SendFlags = SendFlags::empty();

/// How long the thread's send may wait before it looks again. `None`: it need not look.
fn next_look() -> Result<Option<Duration>, Error> {
    match fence::left() {
        Some(left) if left.is_zero() => {
            log::warn!(event = "send_closed"; "ended a send: {Closed}");
            Err(Error::Other(Box::new(Closed)))
        }
        left => Ok(left.map(|left| left.min(LOOK))),
    }
}

/// The earlier of two times, each of which may be never.
fn earlier<T: Ord>(one: Option<T>, other: Option<T>) -> Option<T> {
    one.into_iter().chain(other).min()
}

/// `None`: never.
fn deadline(timeout: NextTimeout) -> Option<Instant> {
    match timeout.after.is_not_happening() {
        true => None,
        false => Instant::now().checked_add(*timeout.after),
    }
}

/// Whether an idle connection is open: an end of the connection, or bytes that nobody has asked for, could be read.
pub(super) fn is_quiet(stream: &TcpStream) -> bool {
    let mut byte = [0];
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
    matches!(recv(stream, &mut byte[..], flags), Err(Errno::AGAIN))
}

/// Waits for an event, for a signal, or until the deadline.
fn poll_until(fds: &mut [PollFd<'_>], until: Option<Instant>) -> io::Result<()> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let left = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(fds, left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// An address that has not answered yet.
struct ConnectTry {
    fd: OwnedFd,
    address: SocketAddr,
    began: Instant,
}

/// Connects to the first address that answers. `worked` is tried first; the others keep their order, but the families of
/// addresses take turns, so that a family without a way costs one wait only.
///
/// The first try has the permit of its line, each further one a permit of `spare`. Without one, the oldest try makes room
/// after a while, so that a name with many silent addresses takes no descriptors from other receivers.
pub(super) fn connect_to_first(
    addresses: &[SocketAddr],
    worked: Option<IpAddr>,
    timeout: NextTimeout,
    spare: impl Fn() -> Option<Permit>,
) -> Result<(TcpStream, SocketAddr), Error> {
    let until = deadline(timeout);
    let mut waiting = in_order(addresses, worked).into_iter().peekable();
    let mut tries: Vec<ConnectTry> = Vec::new();
    // One less than there are tries, or more.
    let mut permits: Vec<Permit> = Vec::new();
    let mut next_at = Instant::now();
    let mut failed = None;
    loop {
        let now = Instant::now();
        let is_next = tries.is_empty() || next_at <= now;
        if is_next && let Some(address) = waiting.peek().copied() {
            if tries.len() > permits.len() && tries.len() < MOST_TRIES {
                permits.extend(spare());
            }
            let is_full = tries.len() > permits.len();
            let oldest = tries.first().filter(|_| is_full);
            match oldest.map(|oldest| oldest.began + MAKES_ROOM_AFTER) {
                Some(later) if later > now => next_at = later,
                makes_room => {
                    tries.drain(..usize::from(makes_room.is_some()));
                    waiting.next();
                    match begin(address) {
                        Ok(fd) => {
                            let began = now;
                            tries.push(ConnectTry { fd, address, began });
                            next_at = now + NEXT_ADDRESS_AFTER;
                        }
                        Err(error) if Shortage::of(&error).is_some() => return Err(error.into()),
                        Err(error) => failed = Some(error),
                    }
                    continue;
                }
            }
        }
        if tries.is_empty() {
            let none = || ErrorKind::ConnectionRefused.into();
            return Err(failed.unwrap_or_else(none).into());
        }
        if until.is_some_and(|until| until <= Instant::now()) {
            return Err(Error::Timeout(timeout.reason));
        }
        let wake_at = match waiting.peek() {
            Some(_) => Some(until.map_or(next_at, |until| until.min(next_at))),
            None => until,
        };
        let fds = (tries.iter()).map(|one| PollFd::new(&one.fd, PollFlags::OUT));
        let mut fds: Vec<_> = fds.collect();
        poll_until(&mut fds, wake_at)?;
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let ready: Vec<bool> = fds.iter().map(is_ready).collect();
        for number in (0..ready.len()).rev().filter(|number| ready[*number]) {
            let ConnectTry { fd, address, .. } = tries.remove(number);
            match socket_error(&fd).map_err(io::Error::from)? {
                Ok(()) => return Ok((finish(fd)?, address)),
                Err(error) => failed = Some(error.into()),
            }
            drop(fd);
            permits.truncate(tries.len().saturating_sub(1));
            // No reason to wait for the next.
            next_at = Instant::now();
        }
    }
}

/// Begins to connect.
fn begin(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let fd = socket_with(family, SocketType::STREAM, CLOSE_ON_EXEC, None)?;
    #[cfg(target_vendor = "apple")]
    rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)?;
    ioctl_fionbio(&fd, true)?;
    match connect(&fd, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(fd),
        Err(error) => Err(error.into()),
    }
}

#[cfg(not(target_vendor = "apple"))]
const CLOSE_ON_EXEC: SocketFlags = SocketFlags::CLOEXEC;
#[cfg(target_vendor = "apple")]
const CLOSE_ON_EXEC: SocketFlags = SocketFlags::empty();

fn finish(fd: OwnedFd) -> io::Result<TcpStream> {
    ioctl_fionbio(fd.as_fd(), false)?;
    let stream = TcpStream::from(fd);
    stream.set_nodelay(true)?;
    Ok(stream)
}

fn in_order(addresses: &[SocketAddr], worked: Option<IpAddr>) -> Vec<SocketAddr> {
    let of_first = |address: &SocketAddr| address.is_ipv4() == addresses[0].is_ipv4();
    let (one, other): (Vec<_>, Vec<_>) = addresses.iter().copied().partition(of_first);
    let (mut one, mut other) = (one.into_iter(), other.into_iter());
    let mut order = Vec::with_capacity(addresses.len());
    while order.len() < addresses.len() {
        order.extend(one.next());
        order.extend(other.next());
    }
    let known = (order.iter()).position(|address| Some(address.ip()) == worked);
    if let Some(known) = known {
        order[..=known].rotate_right(1);
    }
    order
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;
    use std::io::Write;
    use std::net::TcpListener;
    use std::sync::atomic::Ordering;

    use ureq::Timeout;

    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().expect("an address")
    }

    #[test]
    fn families_take_turns_after_the_address_that_worked() {
        let [a, b, c] = ["[2001:200::1]:1", "[2001:200::2]:1", "[2001:200::3]:1"].map(address);
        let [d, e] = ["8.8.8.8:1", "9.9.9.9:1"].map(address);
        assert_eq!(in_order(&[a, b, c, d, e], None), [a, d, b, e, c]);
        assert_eq!(in_order(&[d, a, e], Some(e.ip())), [e, d, a]);
        assert_eq!(in_order(&[a, b], Some(d.ip())), [a, b]);
        assert_eq!(in_order(&[], None), []);
    }

    fn within(after: Duration) -> NextTimeout {
        NextTimeout {
            after: after.into(),
            reason: Timeout::Connect,
            ..NextTimeout::default()
        }
    }

    /// An address that does not answer: its queue of connections is full.
    pub(crate) struct Deaf {
        listener: TcpListener,
        _queue: Vec<OwnedFd>,
    }

    impl Deaf {
        pub(crate) fn new() -> Self {
            let listener = TcpListener::bind("127.0.0.2:0").expect("a port");
            rustix::net::listen(&listener, 0).expect("a socket");
            let address = listener.local_addr().expect("an address");
            let queue = (0..8).map(|_| begin(address).expect("a socket")).collect();
            Self {
                listener,
                _queue: queue,
            }
        }

        pub(crate) fn address(&self) -> SocketAddr {
            self.listener.local_addr().expect("an address")
        }
    }

    fn connect(
        addresses: &[SocketAddr],
        worked: Option<IpAddr>,
        timeout: NextTimeout,
    ) -> Result<(TcpStream, SocketAddr), Error> {
        connect_to_first(addresses, worked, timeout, Permit::spare)
    }

    /// R46: the addresses of a name are chosen by whoever registers it.
    #[test]
    fn a_name_with_many_silent_addresses_takes_few_descriptors() {
        let deaf: Vec<Deaf> = (0..16).map(|_| Deaf::new()).collect();
        let addresses: Vec<SocketAddr> = deaf.iter().map(Deaf::address).collect();
        let permits = Cell::new(0);
        let spare = || {
            permits.set(permits.get() + 1);
            Permit::spare()
        };
        let error = connect_to_first(&addresses, None, within(Duration::from_secs(3)), spare);
        assert!(matches!(error, Err(Error::Timeout(_))), "{error:?}");
        assert_eq!(permits.get(), 2);
    }

    #[test]
    fn without_a_spare_permit_a_silent_address_makes_room_for_the_next() {
        let deaf = [Deaf::new(), Deaf::new()];
        let good = TcpListener::bind("127.0.0.1:0").expect("a port");
        let good = good.local_addr().expect("an address");
        let addresses = [deaf[0].address(), deaf[1].address(), good];
        let timeout = within(Duration::from_secs(20));
        let began = Instant::now();
        let (_, found) = connect_to_first(&addresses, None, timeout, || None).expect("an answer");
        assert_eq!(found, good);
        assert!(began.elapsed() >= MAKES_ROOM_AFTER * 2);
    }

    #[test]
    fn an_address_that_does_not_answer_costs_a_quarter_of_a_second_once() {
        let deaf = Deaf::new();
        let good = TcpListener::bind("127.0.0.1:0").expect("a port");
        let good = good.local_addr().expect("an address");
        let addresses = [deaf.address(), good];
        let began = Instant::now();
        let (stream, found) =
            connect(&addresses, None, within(Duration::from_secs(20))).expect("an answer");
        assert!(began.elapsed() >= NEXT_ADDRESS_AFTER);
        assert!(began.elapsed() < Duration::from_secs(5));
        assert_eq!(
            (stream.peer_addr().expect("connected"), found),
            (good, good)
        );
        let worked = Some(found.ip());
        let mut best = Duration::MAX;
        for _ in 0..5 {
            let began = Instant::now();
            let found = connect(&addresses, worked, within(Duration::from_secs(20)));
            assert_eq!(found.expect("an answer").1, good);
            best = best.min(began.elapsed());
        }
        assert!(best < NEXT_ADDRESS_AFTER, "{best:?}");
    }

    #[test]
    fn addresses_that_refuse_or_do_not_answer_have_their_error() {
        let refusing = |host: &str| {
            let listener = TcpListener::bind((host, 0)).expect("a port");
            listener.local_addr().expect("an address")
        };
        let (one, other) = (refusing("127.0.0.1"), refusing("127.0.0.3"));
        let began = Instant::now();
        let error = connect(&[one, other], None, within(Duration::from_secs(20)))
            .expect_err("nobody listens");
        assert!(matches!(&error, Error::Io(io) if io.kind() == ErrorKind::ConnectionRefused));
        assert!(began.elapsed() < Duration::from_secs(5));
        let deaf = Deaf::new();
        let error = connect(
            &[one, deaf.address()],
            None,
            within(Duration::from_millis(50)),
        );
        assert!(
            matches!(error, Err(Error::Timeout(Timeout::Connect))),
            "{error:?}"
        );
    }

    fn pair() -> (ReceiverSocket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let (stream, _) =
            connect(&[address], None, within(Duration::from_secs(20))).expect("a listener");
        let (peer, _) = listener.accept().expect("a connection");
        let buffers = LazyBuffers::new(1024, 64 * 1024);
        (ReceiverSocket::new(Arc::new(stream), buffers), peer)
    }

    /// R14: the lease, and not the timeout, limits a send.
    #[test]
    fn a_send_ends_when_its_lease_has_not_been_seen() {
        use crate::clock::BootTime;
        use crate::dispatch::fence::{Fence, begin};

        let fence = Arc::new(Fence::default());
        let soon = || BootTime::now().after(Duration::from_millis(200));
        let is_closed = |result: Result<bool, Error>| matches!(result, Err(Error::Other(inner)) if inner.is::<Closed>());
        let long = within(Duration::from_secs(60));
        fence.lease.store(7, Ordering::Relaxed);
        fence.set(soon());
        fence.enter();
        begin(7);
        let (mut socket, mut peer) = pair();
        let began = Instant::now();
        assert!(is_closed(socket.await_input(long)));
        assert!(began.elapsed() < Duration::from_secs(20));
        assert!(is_closed(socket.transmit_output(1, long).map(|()| true)));
        // Looks at the lease move the end on, while the send waits.
        fence.set(soon());
        let (mover, pulse) = (Arc::clone(&fence), Duration::from_millis(20));
        let renewing = std::thread::spawn(move || {
            let until = Instant::now() + Duration::from_secs(2);
            while Instant::now() < until {
                mover.set(soon());
                std::thread::sleep(pulse);
            }
            peer.write_all(b"x").expect("a connection");
            peer
        });
        assert!(matches!(socket.await_input(long), Ok(true)));
        let _peer = renewing.join().expect("no panic");
        // A new lease does not keep the sends of the lost one open.
        fence.lease.store(8, Ordering::Relaxed);
        fence.set(BootTime::now().after(Duration::from_secs(60)));
        assert!(is_closed(socket.await_input(long)));
    }

    #[test]
    fn a_write_without_room_times_out_unless_input_arrives_and_then_continues() {
        let (mut socket, mut peer) = pair();
        let (soon, later) = (
            within(Duration::from_millis(50)),
            within(Duration::from_secs(20)),
        );
        let amount = 64 * 1024;
        socket.buffers().output().fill(b'x');
        let mut whole = 0;
        while socket.transmit_output(amount, soon).is_ok() {
            whole += amount;
        }
        peer.write_all(b"?").expect("a connection");
        let error = loop {
            match socket.transmit_output(amount, later) {
                Ok(()) => whole += amount,
                Err(error) => break error,
            }
        };
        assert!(
            matches!(&error, Error::Other(inner) if inner.is::<Stalled>()),
            "{error:?}"
        );
        assert!(socket.await_input(later).expect("input"));
        assert_eq!(socket.buffers().input(), b"?");
        let reader = std::thread::spawn(move || {
            let mut all = Vec::new();
            peer.read_to_end(&mut all).map(|_| all.len())
        });
        socket.transmit_output(amount, later).expect("room");
        drop(socket);
        let read = reader.join().expect("no panic").expect("the end");
        // The write that timed out had sent a part.
        assert!(
            (whole + amount..whole + 2 * amount).contains(&read),
            "{read} of {whole}"
        );
    }

    #[test]
    fn a_connection_is_quiet_until_bytes_or_its_end_arrive() {
        let until = |socket: &ReceiverSocket| {
            let limit = Instant::now() + Duration::from_secs(20);
            while is_quiet(&socket.stream) {
                assert!(Instant::now() < limit, "still quiet");
                std::thread::yield_now();
            }
        };
        let (socket, mut peer) = pair();
        assert!(is_quiet(&socket.stream));
        peer.write_all(b"?").expect("a connection");
        until(&socket);
        let (socket, peer) = pair();
        drop(peer);
        until(&socket);
    }
}

//! A proxy between a relay and a receiver that loses the first responses: the receiver has the requests, but the
//! sender cannot know.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

pub(crate) struct Proxy {
    address: SocketAddr,
    /// The number of responses that the proxy will still lose.
    left: Arc<AtomicUsize>,
}

impl Proxy {
    /// A proxy in front of the receiver at `port` that loses the first `answers` responses.
    pub(crate) fn losing(answers: usize, port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let left = Arc::new(AtomicUsize::new(answers));
        let shared = Arc::clone(&left);
        // The thread and its connections end with the process.
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let left = Arc::clone(&shared);
                std::thread::spawn(move || {
                    // Either side may close a connection; that is no error of the proxy.
                    let _ = pass(&client, port, &left);
                });
            }
        });
        Self { address, left }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/events", self.address)
    }

    /// The number of responses that are still to be lost.
    pub(crate) fn left(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }
}

/// Forwards requests and responses. The receiver handles a request before it responds, so only the response is lost.
fn pass(client: &TcpStream, port: u16, left: &AtomicUsize) -> std::io::Result<()> {
    let receiver = TcpStream::connect(("127.0.0.1", port))?;
    let (mut from, mut to) = (client.try_clone()?, receiver.try_clone()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Write);
    });
    let mut buffer = [0; 4096];
    loop {
        let read = (&receiver).read(&mut buffer)?;
        let take = |left: usize| left.checked_sub(1);
        let is_lost = read > 0
            && left
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, take)
                .is_ok();
        if read == 0 || is_lost {
            client.shutdown(Shutdown::Both)?;
            return receiver.shutdown(Shutdown::Both);
        }
        (&mut &*client).write_all(&buffer[..read])?;
    }
}

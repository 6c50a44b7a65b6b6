//! A connection of ureq that makes fewer system calls, and takes every response that has arrived.
//!
//! ureq writes head and body separately, which is two packets and two wake-ups of the receiver, and it sets the socket's
//! timeouts before each read, because the remaining time always differs. This connection writes head and body at once if
//! they fit, and rounds timeouts up. That is about a third more requests per second than plain ureq.
//!
//! A receiver may answer before it has read the request, and close the connection: then a write fails, but the response
//! is there. And ureq refuses a response because of one odd line of its head: [`Head`] gives ureq a head that it can read.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ureq::Error;
use ureq::unversioned::transport::{Buffers, ConnectionDetails, Connector, NextTimeout, Transport};

use super::head::{Head, Progress};
use super::lines::LineWatch;
use super::proxy::remove_mark;
use super::socket::Stalled;

/// The sizes of the buffers of each connection. They are small because there may be hundreds of connections.
pub(super) const INPUT_BYTES: usize = 16 * 1024;
pub(super) const OUTPUT_BYTES: usize = 34 * 1024;
/// The most bytes of one combined write. For longer requests, ureq chooses the pieces.
const MOST_PENDING: usize = 16 * 1024;
/// Timeouts are rounded up to a multiple of this step, so that they rarely change.
const TIMEOUT_STEP_MS: u128 = 100;
/// The timeout for reading input that has already arrived.
const AT_ONCE: Duration = Duration::from_millis(10);

/// Wraps the connection of the connectors before it in the chain.
#[derive(Debug)]
pub(super) struct OneWriteConnector {
    pub(super) watch: Arc<LineWatch>,
    /// A proxy gets the requests, with the whole URL.
    pub(super) is_forwarded: bool,
}

impl<In: Transport> Connector<In> for OneWriteConnector {
    type Out = OneWrite<In>;

    fn connect(
        &self,
        _: &ConnectionDetails,
        chained: Option<In>,
    ) -> Result<Option<Self::Out>, Error> {
        Ok(chained.map(|inner| OneWrite {
            inner,
            pending: Vec::new(),
            stage: HeadStage::Idle,
            head: Head::default(),
            shown: UnreadHead::default(),
            watch: Arc::clone(&self.watch),
            is_forwarded: self.is_forwarded,
        }))
    }
}

#[derive(Debug)]
pub(super) struct OneWrite<In> {
    inner: In,
    /// Bytes that ureq has written and that this connection has not yet sent.
    pending: Vec<u8>,
    stage: HeadStage,
    head: Head,
    /// The head for ureq, until ureq has read it.
    shown: UnreadHead,
    watch: Arc<LineWatch>,
    is_forwarded: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HeadStage {
    Idle,
    /// The request is being written, or the head of the response read.
    Exchange,
    /// As before, but the rest of the request is not sent: the receiver has answered.
    Answered,
    /// The body of the response follows, or something that is not HTTP.
    Body,
}

impl<In: Transport> OneWrite<In> {
    fn flush(&mut self, timeout: NextTimeout, began: Instant) -> Result<(), Error> {
        if self.pending.is_empty() {
            return Ok(());
        }
        if timeout.after.is_zero() {
            return Err(Error::Timeout(timeout.reason));
        }
        let amount = self.pending.len();
        self.inner.buffers().output()[..amount].copy_from_slice(&self.pending);
        self.pending.clear();
        self.send(amount, timeout, began)
    }

    /// Sends output. Does not fail if the receiver has already answered.
    fn send(&mut self, amount: usize, timeout: NextTimeout, began: Instant) -> Result<(), Error> {
        let mut left = timeout;
        loop {
            let Err(error) = self.inner.transmit_output(amount, left) else {
                return Ok(());
            };
            let is_stalled = matches!(&error, Error::Other(inner) if inner.is::<Stalled>());
            match self.take_answer() {
                Ok(true) => {
                    self.stage = HeadStage::Answered;
                    return Ok(());
                }
                Ok(false) if is_stalled => left = remaining(timeout, began),
                Err(closed) if is_stalled => return Err(closed),
                Ok(false) | Err(_) => return Err(error),
            }
        }
    }

    /// Reads what has arrived. Whether it has the status of a response, or is not HTTP. An error: the connection ends.
    fn take_answer(&mut self) -> Result<bool, Error> {
        loop {
            match self.read(NextTimeout {
                after: AT_ONCE.into(),
                ..NextTimeout::default()
            }) {
                Ok(true) => {}
                Ok(false) => return Err(Error::Io(ErrorKind::UnexpectedEof.into())),
                Err(error) if is_timeout(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
            if self.parse() == Progress::NotHttp || self.head.has_status() {
                // ureq must not take the rest of the input for a head.
                self.inner.buffers().input_consume(0);
                return Ok(true);
            }
        }
    }

    fn read(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let has_more = self.inner.await_input(timeout)?;
        if has_more {
            self.watch.answers();
        }
        Ok(has_more)
    }

    /// Reads input, for which the receiver has a little more time than the timeout: this process may have been suspended
    /// meanwhile, and a response that has already arrived was in time.
    fn read_in_time(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        if !timeout.after.is_zero() {
            match self.read(rounded_up(timeout)) {
                Err(error) if is_timeout(&error) => {}
                input => return input,
            }
        }
        let after = AT_ONCE.into();
        self.read(NextTimeout { after, ..timeout })
    }

    fn parse(&mut self) -> Progress {
        let buffers = self.inner.buffers();
        let (used, progress) = self.head.read(buffers.input());
        buffers.input_consume(used);
        progress
    }

    /// Reads the head of the response.
    fn read_head(&mut self, timeout: NextTimeout, began: Instant) -> Result<bool, Error> {
        let mut has_read = false;
        let mut end = None;
        loop {
            match self.parse() {
                Progress::Whole => break,
                // ureq says what is wrong.
                Progress::NotHttp => {
                    self.stage = HeadStage::Body;
                    return Ok(true);
                }
                Progress::Part => {}
            }
            let left = match has_read {
                true => remaining(timeout, began),
                false => timeout,
            };
            if has_read && left.after.is_zero() {
                end.get_or_insert(Err(Error::Timeout(timeout.reason)));
            }
            if let Some(end) = end {
                if !self.head.has_status() {
                    return end;
                }
                // Whatever else is missing, the status says what the receiver did.
                self.head.cut();
                let buffers = self.inner.buffers();
                buffers.input_consume(buffers.input().len());
                break;
            }
            end = match self.read_in_time(left) {
                Ok(true) => None,
                end => Some(end),
            };
            has_read = true;
        }
        let arrived = self.inner.buffers().input().len();
        if self.stage == HeadStage::Answered {
            self.head.close();
        }
        self.head.write(&mut self.shown.0, arrived);
        self.watch.keeps(self.head.idle());
        self.stage = HeadStage::Body;
        Ok(true)
    }
}

impl<In: Transport> Transport for OneWrite<In> {
    fn buffers(&mut self) -> &mut dyn Buffers {
        match self.shown.0.is_empty() {
            true => self.inner.buffers(),
            false => &mut self.shown,
        }
    }

    fn transmit_output(&mut self, mut amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        match self.stage {
            HeadStage::Idle | HeadStage::Body => {
                self.stage = HeadStage::Exchange;
                self.head = Head::default();
                self.watch.begins();
            }
            HeadStage::Exchange => {}
            HeadStage::Answered => return Ok(()),
        }
        if self.is_forwarded {
            amount = remove_mark(&mut self.inner.buffers().output()[..amount]);
        }
        let output = &self.inner.buffers().output()[..amount];
        if self.pending.len() + amount <= MOST_PENDING {
            self.pending.extend_from_slice(output);
            return Ok(());
        }
        if self.pending.is_empty() {
            return self.send(amount, timeout, Instant::now());
        }
        // `flush` needs the buffer for the pending bytes.
        let output = output.to_vec();
        let began = Instant::now();
        self.flush(timeout, began)?;
        if self.stage == HeadStage::Answered {
            return Ok(());
        }
        self.inner.buffers().output()[..amount].copy_from_slice(&output);
        self.send(amount, timeout, began)
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        let began = Instant::now();
        self.flush(timeout, began)?;
        match self.stage {
            HeadStage::Exchange | HeadStage::Answered => self.read_head(timeout, began),
            HeadStage::Idle | HeadStage::Body => self.read_in_time(timeout),
        }
    }

    /// ureq calls this when a connection returns to the pool and again when it leaves the pool. [`super::lines`] has
    /// seen before whether the connection can be used.
    fn is_open(&mut self) -> bool {
        self.pending.is_empty()
    }

    fn is_tls(&self) -> bool {
        self.inner.is_tls()
    }
}

/// A head that ureq has not read.
#[derive(Debug, Default)]
struct UnreadHead(Vec<u8>);

impl Buffers for UnreadHead {
    fn output(&mut self) -> &mut [u8] {
        &mut []
    }

    fn input(&self) -> &[u8] {
        &self.0
    }

    fn input_append_buf(&mut self) -> &mut [u8] {
        &mut []
    }

    fn input_appended(&mut self, _: usize) {}

    fn input_consume(&mut self, amount: usize) {
        self.0.drain(..amount);
    }

    fn tmp_and_output(&mut self) -> (&mut [u8], &mut [u8]) {
        (&mut [], &mut [])
    }

    fn can_use_input(&self) -> bool {
        true
    }
}

fn is_timeout(error: &Error) -> bool {
    match error {
        Error::Timeout(_) => true,
        Error::Io(error) => matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock),
        _ => false,
    }
}

/// What is left of a timeout.
fn remaining(mut timeout: NextTimeout, began: Instant) -> NextTimeout {
    if !timeout.after.is_not_happening() {
        timeout.after = timeout.after.saturating_sub(began.elapsed()).into();
    }
    timeout
}

fn rounded_up(mut timeout: NextTimeout) -> NextTimeout {
    if !timeout.after.is_not_happening() {
        let steps = (*timeout.after).as_millis() / TIMEOUT_STEP_MS + 1;
        if let Ok(millis) = u64::try_from(steps * TIMEOUT_STEP_MS) {
            timeout.after = Duration::from_millis(millis).into();
        }
    }
    timeout
}

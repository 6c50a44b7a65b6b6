//! The dispatcher.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use diesel_outbox::{Dispatcher, Failure, Message, Outcome, ReasonCode, Response};
use redis::{Client, Connection, ErrorKind, RedisError, ServerErrorKind};

/// Less than OUTBOX_SEND_TIMEOUT: another relay takes messages over when this time has passed.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Appends each message to a stream.
///
/// Redis answers after it has written the entry. With `appendonly yes` and `appendfsync always` the entry then survives a
/// crash of the server; with its default settings, Redis may lose the last second.
pub struct Streams {
    client: Client,
    stream: String,
    /// Free connections: one for each thread that sends at the same time.
    free: Mutex<Vec<Connection>>,
}

impl Streams {
    pub fn new(url: &str, stream: &str) -> Result<Self, RedisError> {
        Ok(Self {
            client: Client::open(url)?,
            stream: stream.to_owned(),
            free: Mutex::default(),
        })
    }

    fn connection(&self) -> Result<Connection, RedisError> {
        let free = self
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        if let Some(connection) = free {
            return Ok(connection);
        }
        let connection = self.client.get_connection_with_timeout(TIMEOUT)?;
        connection.set_read_timeout(Some(TIMEOUT))?;
        connection.set_write_timeout(Some(TIMEOUT))?;
        Ok(connection)
    }

    /// Appends the message, and returns the id of its entry. A connection that failed is dropped.
    fn append(&self, connection: &mut Connection, message: &Message) -> Result<String, RedisError> {
        let mut add = redis::cmd("XADD");
        add.arg(&self.stream).arg("*");
        add.arg("id").arg(message.message_id.to_string());
        add.arg("topic").arg(&message.topic);
        add.arg("payload").arg(&message.payload);
        if let Some(key) = &message.ordering_key {
            add.arg("key").arg(key);
        }
        if let Some(headers) = &message.headers {
            add.arg("headers").arg(headers);
        }
        add.query(connection)
    }
}

impl Dispatcher for Streams {
    fn dispatch(&self, message: &Message) -> Outcome {
        let mut connection = match self.connection() {
            Ok(connection) => connection,
            // Nothing was sent.
            Err(error) => return Outcome::Retry(failure(ReasonCode::Connect, &error)),
        };
        match self.append(&mut connection, message) {
            Ok(entry) => {
                self.free
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(connection);
                Outcome::Delivered(Response::new(None, Some(entry)))
            }
            // Redis may have the entry: then it comes twice.
            Err(error) if error.is_timeout() => {
                Outcome::Retry(failure(ReasonCode::Timeout, &error))
            }
            Err(error) if error.is_io_error() => {
                Outcome::Retry(failure(ReasonCode::ConnectionLost, &error))
            }
            // The server loads its data: nothing was written, and no attempt is counted.
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading) => {
                Outcome::Wait(failure(ReasonCode::ServerError, &error))
            }
            Err(error) => Outcome::Retry(failure(ReasonCode::ServerError, &error)),
        }
    }
}

fn failure(code: ReasonCode, error: &RedisError) -> Failure {
    Failure::new(code, error.to_string())
}

//! The dispatcher.

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, PoisonError, RwLock};

use diesel_outbox::{Dispatcher, Failure, Message, Outcome, ReasonCode, Response};
use rdkafka::client::ClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::error::{KafkaError, KafkaResult, RDKafkaErrorCode};
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{
    BaseRecord, DeliveryResult, NoCustomPartitioner, Producer, ProducerContext, ThreadedProducer,
};

/// Produces each message, and waits until all in-sync replicas have it.
///
/// The producer is idempotent: its own retries neither repeat nor reorder records. It gives up after two seconds, less than
/// OUTBOX_SEND_TIMEOUT; then the relay retries, and Kafka may get the message twice.
///
/// `key_run` must be 1 (the default) in batched mode: of two messages of a key in a batch, the second may succeed alone.
pub struct Kafka {
    config: ClientConfig,
    topic: String,
    producer: RwLock<Arc<ThreadedProducer<Reports>>>,
}

/// Passes the result of each message to the thread that waits for it.
struct Reports;

/// The partition and offset of a record, or the error.
type Report = KafkaResult<(i32, i64)>;

impl ClientContext for Reports {}

impl ProducerContext<NoCustomPartitioner> for Reports {
    type DeliveryOpaque = Box<SyncSender<Report>>;

    fn delivery(&self, result: &DeliveryResult<'_>, waiting: Self::DeliveryOpaque) {
        use rdkafka::Message as _;
        let result = match result {
            Ok(record) => Ok((record.partition(), record.offset())),
            Err((error, _)) => Err(error.clone()),
        };
        // The channel has room for its only result, and the sender thread waits for it.
        let _ = waiting.try_send(result);
    }
}

impl Kafka {
    pub fn new(brokers: &str, topic: &str) -> KafkaResult<Self> {
        let mut config = ClientConfig::new();
        config
            .set("bootstrap.servers", brokers)
            .set("acks", "all")
            .set("enable.idempotence", "true")
            .set("message.timeout.ms", "2000")
            // By default up to 10 s: messages would time out while the producer waits to connect again.
            .set("reconnect.backoff.max.ms", "500")
            // The partition of a key is that of Kafka's own clients.
            .set("partitioner", "murmur2_random");
        Ok(Self {
            producer: RwLock::new(Arc::new(producer(&config)?)),
            config,
            topic: topic.to_owned(),
        })
    }

    /// The producer. One that has met a fatal error can do nothing more, and is replaced.
    fn producer(&self) -> KafkaResult<Arc<ThreadedProducer<Reports>>> {
        let current = Arc::clone(&self.producer.read().unwrap_or_else(PoisonError::into_inner));
        if current.client().fatal_error().is_none() {
            return Ok(current);
        }
        let mut kept = self
            .producer
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if kept.client().fatal_error().is_some() {
            *kept = Arc::new(producer(&self.config)?);
        }
        Ok(Arc::clone(&kept))
    }

    /// Hands the message to the producer, and returns where the report will be.
    fn send(&self, message: &Message) -> KafkaResult<Receiver<Report>> {
        let (waiting, report) = sync_channel(1);
        let id = message.message_id.to_string();
        let header = |key, value| Header { key, value };
        let mut headers = OwnedHeaders::new()
            .insert(header("id", Some(&id)))
            .insert(header("topic", Some(&message.topic)));
        if let Some(stored) = &message.headers {
            headers = headers.insert(header("headers", Some(stored)));
        }
        let mut record = BaseRecord::with_opaque_to(&self.topic, Box::new(waiting))
            .payload(&message.payload)
            .headers(headers);
        record.key = message.ordering_key.as_ref();
        let sent = self.producer()?.send(record);
        sent.map(|()| report).map_err(|(error, _)| error)
    }
}

fn producer(config: &ClientConfig) -> KafkaResult<ThreadedProducer<Reports>> {
    config.create_with_context(Reports)
}

/// Waits for the report of a message. It comes at the latest when the message times out.
fn outcome(sent: KafkaResult<Receiver<Report>>) -> Outcome {
    // Without a report, the producer is gone.
    let report = sent.and_then(|report| report.recv().unwrap_or(Err(KafkaError::Canceled)));
    let error = match report {
        Ok((partition, offset)) => {
            let place = format!("partition {partition}, offset {offset}");
            return Outcome::Delivered(Response::new(None, Some(place)));
        }
        Err(error) => error,
    };
    match error.rdkafka_error_code() {
        // The producer's queue is full: nothing was sent, and no attempt is counted.
        Some(RDKafkaErrorCode::QueueFull) => {
            Outcome::Wait(failure(ReasonCode::ServerError, &error))
        }
        // No retry makes the message smaller.
        Some(RDKafkaErrorCode::MessageSizeTooLarge) => {
            Outcome::Dead(failure(ReasonCode::Rejected, &error))
        }
        Some(RDKafkaErrorCode::MessageTimedOut) => {
            Outcome::Retry(failure(ReasonCode::Timeout, &error))
        }
        _ => Outcome::Retry(failure(ReasonCode::ServerError, &error)),
    }
}

impl Dispatcher for Kafka {
    fn dispatch(&self, message: &Message) -> Outcome {
        outcome(self.send(message))
    }

    fn dispatch_batch(&self, messages: &[Message]) -> Vec<Outcome> {
        // All are in flight before the first report is awaited, so they share requests.
        let sent: Vec<_> = messages.iter().map(|message| self.send(message)).collect();
        sent.into_iter().map(outcome).collect()
    }
}

fn failure(code: ReasonCode, error: &KafkaError) -> Failure {
    Failure::new(code, error.to_string())
}

//! A relay and a cluster of Kafka that both go away: nothing is lost, the order of each key holds, and each message has
//! its own outcome. The cluster is librdkafka's mock.

#[path = "../../redis-streams/tests/ground.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod ground;

use std::process::Command;
use std::time::Duration;

use diesel_outbox::{NewMessage, Outbox};
use ground::{Database, Process, eventually, repeats};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;
use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
use rdkafka::{Message, Offset, TopicPartitionList};

const PARTITIONS: i32 = 4;
const BROKERS: i32 = 3;

struct Kafka(MockCluster<'static, DefaultProducerContext>);

impl Kafka {
    fn new() -> Self {
        let cluster = MockCluster::new(BROKERS).expect("a cluster");
        cluster
            .create_topic("outbox", PARTITIONS, BROKERS)
            .expect("a topic");
        Self(cluster)
    }

    fn relay(&self, database: &Database, mode: &str) -> Process {
        let mut relay = Command::new(env!("CARGO_BIN_EXE_kafka"));
        relay.env("KAFKA_BROKERS", self.0.bootstrap_servers());
        // A batched relay calls `dispatch_batch`.
        relay.env("OUTBOX_MODE", mode);
        Process::relay(relay, database)
    }

    fn go_down(&self) {
        for broker in 1..=BROKERS {
            self.0.broker_down(broker).expect("down");
        }
    }

    fn come_up(&self) {
        for broker in 1..=BROKERS {
            self.0.broker_up(broker).expect("up");
        }
    }

    /// The key and the number of all records, in the order of their partition.
    fn arrived(&self) -> Vec<(String, usize)> {
        let consumer: BaseConsumer = ClientConfig::new()
            .set("bootstrap.servers", self.0.bootstrap_servers())
            .set("group.id", "test")
            .set("enable.partition.eof", "true")
            .create()
            .expect("a consumer");
        let mut partitions = TopicPartitionList::new();
        for partition in 0..PARTITIONS {
            partitions
                .add_partition_offset("outbox", partition, Offset::Beginning)
                .expect("a partition");
        }
        consumer.assign(&partitions).expect("assigned");
        let text =
            |bytes: Option<&[u8]>| String::from_utf8(bytes.expect("bytes").into()).expect("a text");
        let (mut records, mut ends) = (Vec::new(), 0);
        while ends < PARTITIONS {
            match consumer.poll(Duration::from_secs(60)).expect("in time") {
                Ok(record) => {
                    let number = text(record.payload()).parse().expect("a number");
                    records.push((text(record.key()), number));
                }
                Err(KafkaError::PartitionEOF(_)) => ends += 1,
                Err(error) => panic!("{error}"),
            }
        }
        records
    }
}

#[test]
fn nothing_is_lost_and_keys_keep_their_order_when_relay_and_brokers_go_away() {
    const EACH: usize = 3_000;
    let modes = ["binary", "batched"];
    let all = EACH * modes.len();
    let (database, kafka) = (Database::new("kafka"), Kafka::new());
    let is_sending = || {
        let begin = database.delivered();
        eventually("the relay is sending", || {
            database.delivered() > begin + 100
        });
    };
    for (round, mode) in modes.into_iter().enumerate() {
        let running = kafka.relay(&database, mode);
        database.enqueue(round * EACH..(round + 1) * EACH);
        is_sending();
        kafka.go_down();
        let failed = || database.count("SELECT count(*) FROM outbox_attempt");
        let before = failed();
        eventually("sends fail", || failed() > before);
        kafka.come_up();
        is_sending();
        running.kill();
        assert!(
            database.delivered() < (round + 1) * EACH,
            "the kill came while messages were in flight"
        );
    }
    let last = kafka.relay(&database, "binary");
    eventually("all are delivered", || database.delivered() == all);
    drop(last);
    let repeats = repeats(&kafka.arrived(), all);
    println!("{all} messages, {repeats} of them twice");
}

#[test]
fn a_message_that_is_too_large_is_dead_lettered_and_those_beside_it_arrive() {
    const OTHERS: usize = 100;
    let (database, kafka) = (Database::new("kafka_large"), Kafka::new());
    let _relay = kafka.relay(&database, "batched");
    // The largest record of librdkafka's default has 1,000,000 bytes.
    let large = NewMessage::new("order.paid", &"x".repeat(1_000_000)).expect("JSON");
    let outbox = Outbox::new("outbox")
        .expect("a name")
        .allow_outside_transaction();
    outbox
        .enqueue(&mut database.connect(), large)
        .expect("enqueued");
    database.enqueue(0..OTHERS);
    eventually("all have an outcome", || {
        database.delivered() == OTHERS
            && database.count("SELECT count(*) FROM outbox_dead WHERE reason = 'REJECTED'") == 1
    });
    assert_eq!(repeats(&kafka.arrived(), OTHERS), 0);
}

/// Kafka refuses the first producer, which is final for that producer.
#[test]
fn a_producer_that_can_send_nothing_more_is_replaced() {
    const ALL: usize = 100;
    let (database, kafka) = (Database::new("kafka_fatal"), Kafka::new());
    kafka.0.request_errors(
        RDKafkaApiKey::InitProducerId,
        &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED],
    );
    let _relay = kafka.relay(&database, "binary");
    database.enqueue(0..ALL);
    eventually("all are delivered", || database.delivered() == ALL);
    assert_eq!(repeats(&kafka.arrived(), ALL), 0);
}

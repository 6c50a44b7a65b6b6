//! The documents of a catalogue of events, against validators of others.

#![allow(dead_code, reason = "of some types there is only the schema")]

use std::io::Write;
use std::process::{Command, Stdio};

use diesel_outbox::catalogue::{Catalogue, EventType};
use diesel_outbox::{Event, catalogue};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::{Value, json};

use crate::example::installed;

/// A customer has paid an order.
#[derive(Serialize, JsonSchema)]
struct OrderPaid {
    order_id: i64,
    /// What was bought: one | or more.
    items: Vec<Item>,
    /// Who paid.
    #[serde(skip_serializing_if = "Option::is_none")]
    customer: Option<Customer>,
    coupon: Option<String>,
    paid_by: Means,
}

/// One line of an order.
#[derive(Serialize, JsonSchema)]
struct Item {
    #[schemars(extend("format" = "uuid"))]
    article: String,
    #[schemars(range(min = 3))]
    count: u32,
    price: (u64, Currency),
}

#[derive(Serialize, JsonSchema)]
enum Currency {
    Euro,
    Pound,
}

#[derive(Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Means {
    Card { last_digits: String },
    Invoice { due: Option<String> },
}

/// A customer, and who recommended us to them.
#[derive(Serialize, JsonSchema)]
struct Customer {
    name: String,
    recommended_by: Option<Box<Customer>>,
}

impl Event for OrderPaid {
    const TOPIC: &'static str = "order.paid";
}

/// A customer has paid an order, as it was written before.
#[derive(Serialize, JsonSchema)]
#[schemars(example = OrderPaid2 { order_id: 7, euro: 42.5 })]
struct OrderPaid2 {
    order_id: i64,
    euro: f64,
}

impl Event for OrderPaid2 {
    const TOPIC: &'static str = "order.paid";
    const VERSION: u32 = 2;
}

/// A tree that contains itself.
#[derive(Serialize, JsonSchema)]
struct Tree {
    left: Option<Box<Tree>>,
    #[serde(flatten)]
    more: std::collections::BTreeMap<String, i64>,
}

impl Event for Tree {
    const TOPIC: &'static str = "a/strange topic~1 %";
}

/// Only a number.
#[derive(Serialize, JsonSchema)]
struct Count(u8);

impl Event for Count {
    const TOPIC: &'static str = "a_strange topic~1 %";
}

fn all() -> Catalogue {
    catalogue![OrderPaid2, OrderPaid, Tree, Count]
}

/// What validators of others find wrong.
fn found(documents: &Value) -> String {
    // Node.js finds packages from the place of the script.
    let packages = installed("receivers-catalogue/node_modules");
    let script = packages.with_file_name(format!("{}.mjs", uuid::Uuid::now_v7()));
    std::fs::write(&script, include_str!("catalogue/validate.mjs")).expect("a script");
    let mut node = Command::new("node")
        .arg(&script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("Node.js");
    let stdin = node.stdin.take();
    let text = documents.to_string();
    (stdin.expect("a pipe").write_all(text.as_bytes())).expect("written");
    let output = node.wait_with_output().expect("it ends");
    std::fs::remove_file(script).expect("our script");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn documents(catalogue: &Catalogue) -> Value {
    json!({
        "asyncapi": catalogue.asyncapi("Shop", "1.0.0"),
        "openapi": catalogue.openapi("Shop", "1.0.0"),
        "events": catalogue.events,
    })
}

/// R64.
#[test]
fn the_documents_and_examples_of_a_catalogue_are_valid() {
    assert_eq!(found(&documents(&all())), "");
    let shop = include_str!("../../examples/webhooks/catalogue.json");
    let shop: Catalogue = serde_json::from_str(shop).expect("a catalogue");
    assert_eq!(shop.events.len(), 2);
    assert_eq!(found(&documents(&shop)), "");
}

/// R64: the test above can fail.
#[test]
fn validators_find_what_is_wrong_in_the_documents() {
    let mut documents = documents(&all());
    documents["asyncapi"]["operations"]["send.order.paid"]["action"] = json!("shout");
    documents["openapi"]["webhooks"]["order.paid"]["post"]["parameters"][0]["$ref"] =
        json!("#/components/parameters/nothing");
    documents["events"][2]["example"]["order_id"] = json!("seven");
    let found = found(&documents);
    for one in [
        "AsyncAPI: ",
        "OpenAPI: ",
        "order.paid: data/order_id must be integer",
    ] {
        assert!(found.contains(one), "{one} in {found}");
    }
}

/// R64.
#[test]
fn a_catalogue_says_what_the_types_say() {
    let all = all();
    let names: Vec<_> = all
        .events
        .iter()
        .map(|one| (one.topic.as_str(), one.version, one.name.as_str()))
        .collect();
    assert_eq!(
        names,
        [
            ("a/strange topic~1 %", 1, "Tree"),
            ("a_strange topic~1 %", 1, "Count"),
            ("order.paid", 1, "OrderPaid"),
            ("order.paid", 2, "OrderPaid2"),
        ]
    );
    assert_eq!(
        all.events[3].example,
        json!({ "order_id": 7, "euro": 42.5 })
    );
    let text = serde_json::to_string(&all).expect("JSON");
    assert_eq!(serde_json::from_str::<Catalogue>(&text).expect("read"), all);
    let page = all.markdown();
    for line in [
        "## order.paid (version 2)",
        "A customer has paid an order.",
        "| `items` | array of Item | yes | What was bought: one \\| or more. |",
        "| `coupon` | string or null | yes |  |",
        "### Item (of order.paid)",
        "| `article` | string (uuid) | yes |  |",
        "Type: `\"Euro\"`, `\"Pound\"`",
        "Type: integer",
    ] {
        assert!(page.contains(line), "{line} in\n{page}");
    }
}

#[test]
#[should_panic(expected = "OrderPaid and OrderPaid are both version 1 of order.paid")]
fn two_types_for_the_same_messages_are_a_fault() {
    drop(Catalogue::new([
        EventType::of::<OrderPaid>(),
        EventType::of::<OrderPaid>(),
    ]));
}

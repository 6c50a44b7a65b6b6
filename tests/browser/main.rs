//! The pages in a real browser, driven by Node.js: an operator's work, with a relay running behind the page, and the
//! portal of a customer. axe looks for barriers on every page, in light and dark.
//! `scripts/install-browser` installs everything the tests need.
//!
//! In every scenario, an error on the console, a violation of the page's policy, a dialog or a request to another
//! host is a failure.

#[path = "../page.rs"]
mod page;
#[path = "../support.rs"]
mod support;

mod ground;
mod shop;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::json;
use uuid::Uuid;

use crate::ground::Ground;
use crate::page::TOKEN;
use crate::shop::Shop;
use crate::support::{Database, database_url};

/// R25: a dead letter is found by topic and reason, opened, requeued and delivered, and the audit log names the
/// operator.
#[test]
fn a_dead_letter_is_requeued_and_delivered() {
    let ground = Ground::new();
    let letter = ground.dead_letter();
    ground.accept();
    let page = ground.page(&[]);
    ground.scenario(&page, "requeue", json!({ "letter": letter }));
    ground.warehouse.wait_for(2);
    let log = page.process.log();
    let line = log.lines().find(|line| line.contains("\"admin_requeue\""));
    let line: serde_json::Value = serde_json::from_str(line.expect("an audit line")).expect("JSON");
    assert_eq!(line["target"], "diesel_outbox::audit");
    assert_eq!(line["who"], "local");
    assert_eq!(line["peer"], "127.0.0.1");
    assert_eq!(line["changed"], 1);
    let what = line["what"].as_str().expect("a text");
    assert!(what.starts_with(&format!("{letter}.")), "{what}");
}

#[test]
fn a_destination_is_paused_and_resumed() {
    let ground = Ground::new();
    let page = ground.page(&[]);
    ground.scenario(&page, "pause", json!({}));
    page.process.wait_for_log("\"destination_closed\"");
    ground.database.enqueue("billing.due", json!(1));
    ground
        .database
        .enqueue("order.paid", json!({ "fine": true }));
    ground.warehouse.wait_for(1);
    assert_eq!(ground.billing.count(), 0);
    ground.scenario(&page, "resume", json!({}));
    ground.billing.wait_for(1);
    for event in ["admin_pause", "admin_resume"] {
        page.process.wait_for_log(&format!("\"{event}\""));
    }
}

#[test]
fn the_token_is_refused_and_accepted() {
    let ground = Ground::new();
    let page = ground.page(&[("OUTBOX_ADMIN_TOKEN", TOKEN)]);
    ground.scenario(&page, "token", json!({ "token": TOKEN }));
    page.process.wait_for_log("\"admin_login\"");
}

#[test]
fn html_from_elsewhere_is_shown_as_text() {
    let ground = Ground::new();
    let hostile = ground.hostile_rows();
    let page = ground.page(&[("OUTBOX_ADMIN_PAYLOADS", "true")]);
    let told = json!({ "letter": 1_000_000, "hostile": hostile });
    ground.scenario(&page, "hostile", told);
}

#[test]
fn the_keyboard_is_enough() {
    let ground = Ground::new();
    let letter = ground.dead_letter();
    let page = ground.page(&[]);
    ground.scenario(&page, "keyboard", json!({ "letter": letter }));
}

#[test]
fn it_works_without_script() {
    let ground = Ground::new();
    let letter = ground.dead_letter();
    let page = ground.page(&[]);
    // The requeued message is dead-lettered again.
    ground.scenario(&page, "noscript", json!({ "letter": letter }));
    for event in [
        "admin_requeue",
        "admin_discard",
        "admin_pause",
        "admin_resume",
    ] {
        page.process.wait_for_log(&format!("\"{event}\""));
    }
}

#[test]
fn it_reads_itself_again_unless_somebody_works_in_it() {
    let ground = Ground::new();
    ground.dead_letter();
    let page = ground.page(&[]);
    ground.scenario(&page, "refresh", json!({}));
}

#[test]
fn who_may_only_look_finds_nothing_to_press() {
    let ground = Ground::new();
    let letter = ground.dead_letter();
    let page = ground.page(&[("OUTBOX_ADMIN_READ_ONLY", "true")]);
    ground.scenario(&page, "readonly", json!({ "letter": letter }));
}

/// R60: also with ten thousand destinations, a million messages and long names. No time is broken, no text is one word a
/// line, no title is tiny, no panel with acts lacks a title.
#[test]
fn it_is_readable_without_barriers_in_both_schemes_wide_and_narrow() {
    let ground = Ground::new();
    let letter = ground.dead_letter();
    let tenant = Uuid::now_v7();
    ground.fill();
    ground::long_rows(&ground.database, tenant);
    ground.crowd();
    let page = ground.page(&[]);
    let folder = ground::folder().join("screenshots");
    std::fs::create_dir_all(&folder).expect("a folder");
    let pages: Vec<&str> = diesel_outbox_pages::operator_pages().collect();
    ground.scenario(
        &page,
        "looks",
        json!({
            "letter": letter,
            "screenshots": folder,
            "pages": pages,
            "tenant": tenant,
            "long": ground::LONG,
            "waits": ground::LONG_WAITS,
        }),
    );
}

#[test]
fn the_login_is_readable_without_barriers() {
    let ground = Ground::new();
    let page = ground.page(&[("OUTBOX_ADMIN_TOKEN", TOKEN)]);
    ground.scenario(&page, "login", json!({}));
}

/// R60: also with ten thousand destinations, a million messages and long names.
#[test]
fn the_portal_is_readable_without_barriers_in_both_schemes_wide_and_narrow() {
    let shop = Shop::new();
    shop.long_rows();
    shop.crowd();
    ground::scenario(shop.server.address, "portal", shop.told());
}

/// R60
#[test]
fn the_portal_is_as_readable_in_german() {
    let shop = Shop::new();
    shop.long_rows();
    ground::scenario(shop.server.address, "portal-german", shop.told());
}

#[test]
fn a_link_without_the_keyboard_and_a_button_without_a_name_are_found() {
    let shop = Shop::new();
    ground::scenario(shop.server.address, "faults", shop.told());
}

/// R60
#[test]
fn the_keyboard_is_enough_for_a_customer() {
    let shop = Shop::new();
    ground::scenario(shop.server.address, "portal-keyboard", shop.told());
}

/// `make screenshots`: an outbox that has been working for a few minutes, so that the images show something.
#[test]
#[ignore = "writes the README's images"]
fn screenshots_for_the_readme() {
    let ground = Ground::of(Database::in_schema(&database_url(), "shop"));
    let letter = ground.dead_letter();
    ground.fill();
    let page = ground.page(&[]);
    let until = Instant::now() + Duration::from_secs(300);
    let mut round = 0;
    while Instant::now() < until {
        ground.trickle(round);
        round += 1;
        std::thread::sleep(Duration::from_millis(500));
    }
    let told = json!({ "letter": letter, "images": images() });
    ground.scenario(&page, "readme", told);
}

/// `make screenshots`
#[test]
#[ignore = "writes the images of the documents"]
fn screenshots_of_the_portal() {
    let shop = Shop::new();
    let mut told = shop.told();
    told["images"] = json!(images());
    ground::scenario(shop.server.address, "portal-images", told);
}

fn images() -> PathBuf {
    let images = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join("docs/images");
    std::fs::create_dir_all(&images).expect("a folder");
    images
}

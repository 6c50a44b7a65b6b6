//! Relays, their leases and their last heartbeats.

use diesel_outbox::program::LeaseRow;
use maud::{Markup, html};

use super::layout::section;
use super::table::{Column, Kind, table_or};
use super::{Refusal, Visit, words};
use crate::Site;
use crate::response::Response;

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let glance = visit.site.glance_now()?;
    let content = html! {
        div.title { h1 { "Relays" } }
        (panel(&glance.leases))
        (own(visit.site))
    };
    Ok(visit.page("Relays").live(true).answer(&content))
}

/// The leases of all relays of the outbox, in any process.
pub(super) fn panel(leases: &[LeaseRow]) -> Markup {
    let columns = [
        Column("Relay", Kind::Text),
        Column("State", Kind::Plain),
        Column("Lease", Kind::Number),
        Column("Last heartbeat", Kind::Number),
        Column("Expires in", Kind::Number),
        Column("Running for", Kind::Number),
    ];
    // If another relay is active, it takes over the messages of an expired lease, and no one needs to act.
    let is_served = leases.iter().any(LeaseRow::is_alive);
    let rows = leases.iter().map(|lease| {
        let has_expired = lease.seconds_left <= 0.0;
        vec![
            html! { span.key { (lease.relay) } },
            html! {
                @if has_expired && is_served { span.badge { "gone" } " " span.quiet { "messages taken over" } }
                @else if has_expired { span.badge.bad { "lease expired" } }
                @else if lease.silent { span.badge.bad { "no heartbeat" } }
                @else if !lease.enabled { span.badge.bad { "switched off" } }
                @else if lease.stands_by { span.badge { "standby" } }
                @else { span.badge.good { "active" } }
            },
            html! { (lease.id) },
            html! { (words::duration(lease.renewed_seconds_ago)) " ago" },
            html! { @if has_expired { "–" } @else { (words::duration(lease.seconds_left)) } },
            html! { (words::duration(lease.started_seconds_ago)) },
        ]
    });
    let none = "No relay holds a lease: none is running, or all shut down cleanly.";
    let heading = "Relays and their leases";
    section("relays", heading, &table_or(none, heading, &columns, rows))
}

/// The health and counters of the relay in this process.
fn own(site: &Site) -> Markup {
    let Some(relay) = &site.relay else {
        return html! { p.quiet { "No relay runs in this process." } };
    };
    let health = relay.health();
    let stats = relay.stats();
    let content = html! {
            div.body {
                dl.facts {
                    dt { "Alive" }
                    dd { @if health.is_live() { span.badge.good { "yes" } } @else { span.badge.bad { "no" } } }
                    dt { "Ready" }
                    dd { @if health.is_ready() { span.badge.good { "yes" } } @else { span.badge.bad { "no" } } }
                    dt { "Since start" }
                    dd {
                        (words::count(i64::try_from(stats.processed()).unwrap_or(i64::MAX), false)) " settled, of which "
                        (words::count(i64::try_from(stats.dead).unwrap_or(i64::MAX), false)) " dead-lettered"
                    }
                }
                @if !health.problems().is_empty() {
                    h3 { "Problems" }
                    ul { @for problem in health.problems() { li { (problem.what) } } }
                }
            }
    };
    section("own", "The relay in this process", &content)
}

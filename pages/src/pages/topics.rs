//! Topics: those of live messages with the relays that serve them, and what is recorded: served, declared.

use diesel_outbox::program::{self, KnownTopic, LiveTopic};
use maud::{Markup, html};

use super::layout::section;
use super::overview::name_of;
use super::table::{Column, Kind, table_or};
use super::{Refusal, Visit, words};
use crate::labels::Labels;
use crate::response::Response;

/// Rows of each list.
const MOST: usize = 500;

/// The topics of live messages, sorted.
pub(super) fn live(visit: &Visit<'_>) -> anyhow::Result<Vec<LiveTopic>> {
    visit.run(&visit.site.searches, program::topics)
}

/// The patterns that a route or a handler of any relay has ever served, and those that are declared.
pub(super) fn served(visit: &Visit<'_>) -> anyhow::Result<Vec<KnownTopic>> {
    visit.run(&visit.site.searches, program::known_topics)
}

pub(super) fn show(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let (live, served) = (live(visit)?, served(visit)?);
    let shown = live.iter().take(MOST);
    let labels = Labels::of(visit, shown.map(|one| one.destination.as_str()))?;
    let content = html! {
        div.title {
            h1 { "Topics" }
            p.quiet { "A message waits until a relay serves its topic." }
        }
        (panel(
            ("live", "Topics of live messages"),
            &[Column("Topic", Kind::Text), Column("Served by", Kind::Plain)],
            live.iter().map(|one| waiting(one, &labels)),
        ))
        (panel(
            ("served", "Recorded topics"),
            &[
                Column("Pattern", Kind::Text),
                Column("Kind", Kind::Plain),
                Column("First", Kind::Short),
                Column("Last", Kind::Short),
            ],
            served.iter().map(pattern),
        ))
        p.quiet {
            "Messages of topics that a route or a handler has served wait for such a relay, even while none runs. "
            "Where topics are declared, messages of other topics wait, too. "
            code { "diesel-outbox topics forget" } " says first what becomes of waiting messages."
        }
    };
    Ok(visit.page("Topics").answer(&content))
}

fn panel(
    (id, heading): (&str, &str),
    columns: &[Column],
    rows: impl ExactSizeIterator<Item = Vec<Markup>>,
) -> Markup {
    let more = i64::try_from(rows.len().saturating_sub(MOST)).unwrap_or(i64::MAX);
    let list = html! {
        (table_or("None.", heading, columns, rows.take(MOST)))
        @if more > 0 { p.none { "and " (words::counted(more, "other", "others")) } }
    };
    section(id, heading, &list)
}

fn waiting(one: &LiveTopic, labels: &Labels) -> Vec<Markup> {
    let relays = match (&one.unserved, one.served_by.as_slice()) {
        (Some(why), _) => html! {
            span.badge.bad { "no relay" } " " (why) ". "
            span.quiet { "Next step: " (program::next_step(why, one.waiting)) "." }
        },
        (None, []) => html! { span.badge.bad { "no relay" } " No relay is active." },
        (None, relays) => html! { (relays.join(", ")) },
    };
    vec![name_of(&one.topic, &one.destination, labels), relays]
}

fn pattern(one: &KnownTopic) -> Vec<Markup> {
    vec![
        html! { span.key { (words::name(&one.pattern)) } },
        html! { (one.kind) },
        words::ago(&one.first_served),
        words::ago(&one.last_served),
    ]
}

//! Plain pages. `maud` escapes every value in parentheses, so names, descriptions and URLs are shown as text.

use diesel_outbox::destinations::{Deliveries, RegisteredDestination, TestAnswer};
use maud::{DOCTYPE, Markup, html};
use rouille::Response;

use crate::orders::events;

fn page(title: &str, content: Markup) -> Response {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                title { (title) }
                style { "body { font: 1rem sans-serif; margin: 2rem auto; max-width: 60rem } td, th { text-align: left; padding: .2rem .8rem .2rem 0 } form { margin: .5rem 0 }" }
            }
            body {
                h1 { (title) }
                (content)
            }
        }
    };
    Response::html(page.into_string())
}

fn button(hook: &RegisteredDestination, action: &str, label: &str) -> Markup {
    html! { form method="post" action=(format!("/webhooks/{}/{action}", hook.name)) { button { (label) } } }
}

fn state(hook: &RegisteredDestination) -> &str {
    match (hook.enabled, hook.disabled_reason.as_deref()) {
        (true, _) if hook.failing => "failing",
        (true, _) => "enabled",
        (false, reason) => reason.unwrap_or("disabled"),
    }
}

pub fn message(title: &str, text: &str) -> Response {
    page(title, html! { p { (text) } p { a href="/" { "Back" } } })
}

pub fn list(hooks: &[RegisteredDestination], has_room: bool) -> Response {
    page(
        "Webhooks",
        html! {
            table {
                tr { th { "URL" } th { "Description" } th { "State" } }
                @for hook in hooks {
                    tr {
                        td { a href=(format!("/webhooks/{}", hook.name)) { (hook.url) } }
                        td { (hook.description.as_deref().unwrap_or_default()) }
                        td { (state(hook)) }
                    }
                }
            }
            @if has_room {
                h2 { "Register" }
                form method="post" action="/webhooks" {
                    p { label { "URL " input name="url" type="url" maxlength="2048" size="60" required; } }
                    p { label { "Description " input name="description" maxlength="200" size="60"; } }
                    @for event in events().events {
                        p { label {
                            input type="checkbox" name="topics" value=(event.topic) checked;
                            (event.topic) ": " (event.description)
                        } }
                    }
                    p { a href="/events" { "What the events contain" } }
                    p { label { "Only from " input name="from_euro" type="number" min="0"; " euro" } }
                    button { "Register" }
                }
            }
            h2 { "Order" }
            form method="post" action="/orders" {
                label { input name="euro" type="number" value="42" min="1" required; " euro " }
                label { input type="checkbox" name="is_paid"; "paid " }
                button { "Order" }
            }
        },
    )
}

pub fn webhook(hook: &RegisteredDestination, secret: &str, deliveries: &Deliveries) -> Response {
    let path = format!("/webhooks/{}", hook.name);
    page(
        "Webhook",
        html! {
            p { (hook.url) " (" (hook.topics.join(", ")) "): " (state(hook)) }
            p { (hook.description.as_deref().unwrap_or_default()) }
            details { summary { "Secret" } code id="secret" { (secret) } }
            (button(hook, "test", "Test"))
            (button(hook, "rotate", "New secret"))
            @if hook.enabled { (button(hook, "disable", "Disable")) } @else { (button(hook, "enable", "Enable")) }
            (button(hook, "remove", "Remove"))
            h2 { "Deliveries" }
            table {
                tr { th { "Event" } th { "State" } th { "Response" } th { "Attempts" } th { "When" } th {} }
                @for row in &deliveries.rows {
                    tr title=(row.message_id) {
                        td { (row.topic) }
                        td { (row.state.as_str()) }
                        td {
                            @if let Some(status) = row.http_status { (status) " " }
                            (row.public_error().unwrap_or_default())
                        }
                        td { (row.attempts) }
                        td {
                            @if let Some(next) = &row.next_attempt_at { "next attempt " (next) }
                            (row.settled_at.as_deref().unwrap_or_default())
                        }
                        td {
                            @if row.can_be_sent_again {
                                form method="post" action=(format!("{path}/again")) {
                                    input type="hidden" name="message_id" value=(row.message_id);
                                    button { "Send again" }
                                }
                            }
                        }
                    }
                }
            }
            @if let Some(next) = deliveries.next { p { a href=(format!("{path}?after={next}")) { "Older" } } }
            p { a href="/" { "All webhooks" } }
        },
    )
}

pub fn test(name: &str, answer: &TestAnswer) -> Response {
    let took = format!("{} ms", answer.took.as_millis());
    page(
        "Test",
        html! {
            p {
                @if let Some(status) = answer.http_status { "Your server responded with " (status) } @else { "No response" }
                " after " (took) ". " (answer.public_error().as_deref().unwrap_or("The event was accepted."))
            }
            pre { (answer.body.as_deref().unwrap_or_default()) }
            p { a href=(format!("/webhooks/{name}")) { "Back" } }
        },
    )
}

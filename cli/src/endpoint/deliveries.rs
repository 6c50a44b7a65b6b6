//! `diesel-outbox endpoint deliveries`, `send-again`, `test` and `verify`

use anyhow::{Result, anyhow, bail};
use diesel::PgConnection;
use diesel_outbox::admin::Place;
use diesel_outbox::endpoints::{
    Delivery, DeliveryFilter, EndpointAnswer, EndpointError, Endpoints, TestAnswer,
};
use diesel_outbox::{ConfigError, ReasonCode, Status};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::output;

#[derive(Debug, clap::Args)]
#[command(
    after_help = "The search of the ledger stops after 2 s, so a page may be short or empty although there are more \
    deliveries: continue with --after. Discarded and cancelled messages are not shown."
)]
pub(crate) struct List {
    /// Name of the endpoint
    name: String,
    /// Only this state: pending, sending, retrying, delivered or dead
    #[arg(long, alias = "status", value_name = "STATE")]
    state: Option<String>,
    /// Only this tenant
    #[arg(long, value_name = "UUID")]
    tenant: Option<Uuid>,
    /// Continue the previous page, which ended with this value
    #[arg(long, value_name = "PLACE")]
    after: Option<String>,
    /// Maximum number of deliveries
    #[arg(long, value_name = "COUNT", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    limit: u32,
    /// Print the deliveries as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn list(conn: &mut PgConnection, endpoints: Endpoints<'_>, how: &List) -> Result<()> {
    let state = parsed("--state", how.state.as_deref(), |text| {
        text.parse::<Status>().map_err(|error| {
            format!("{error}: write pending, sending, retrying, delivered or dead")
        })
    })?;
    let after = parsed("--after", how.after.as_deref(), str::parse::<Place>)?;
    let filter = DeliveryFilter::default();
    let filter = filter.state(state).tenant_id(how.tenant).after(after);
    let limit = usize::try_from(how.limit)?;
    let page = endpoints.deliveries(conn, &how.name, &filter, limit)?;
    if page.rows.is_empty() && page.next.is_none() && endpoints.get(conn, &how.name)?.is_none() {
        return super::missing(&how.name);
    }
    if how.json {
        return output::json(&json!({
            "deliveries": page.rows.iter().map(as_json).collect::<Vec<_>>(),
            "next": page.next.map(|place| place.to_string()),
            "complete": page.is_complete,
        }));
    }
    if !page.rows.is_empty() {
        let mut table =
            output::table(&["message", "topic", "state", "attempts", "when", "response"]);
        for row in &page.rows {
            let waits = || row.waits.as_ref().map(ToString::to_string);
            let when = row.settled_at.clone().or_else(waits);
            table.add_row([
                row.message_id.to_string(),
                output::name(&row.topic),
                row.state.to_string(),
                row.attempts.to_string(),
                output::name(&when.unwrap_or_default()),
                output::name(&answer(row)),
            ]);
        }
        output::line(table)?;
    }
    if !page.is_complete {
        output::line("many rows are being written: some deliveries may be missing")?;
    }
    match page.next {
        Some(place) => output::line(format!("there may be more: --after {place}")),
        None if page.rows.is_empty() => output::line("no deliveries"),
        None => Ok(()),
    }
}

/// Tells whether a message is sent again.
pub(super) fn sent_again(
    conn: &mut PgConnection,
    endpoints: Endpoints<'_>,
    (name, id): (&str, Uuid),
    sent: Result<bool, EndpointError>,
) -> Result<()> {
    match sent {
        Ok(true) => output::line(format!(
            "{id} will be sent to {} again",
            output::shown(name)
        )),
        Ok(false) if endpoints.get(conn, name)?.is_none() => super::missing(name),
        Ok(false) => bail!(
            "the ledger has no delivery of {id} to {name:?}, and there is no such dead letter; \
             a message that still waits is sent anyway"
        ),
        Err(error @ EndpointError::PayloadNotKept { .. }) => bail!("nothing was sent: {error}"),
        Err(error) => Err(error.into()),
    }
}

/// Fails unless the receiver has accepted the test event.
pub(super) fn tested(
    name: &str,
    answer: &TestAnswer,
    has_closed_breaker: bool,
    json: bool,
) -> Result<()> {
    if json {
        output::json(&json!({
            "message_id": answer.message_id.to_string(),
            "went_well": answer.went_well,
            "closed_breaker": has_closed_breaker,
            "http_status": answer.http_status,
            "took_ms": u64::try_from(answer.took.as_millis())?,
            "body": answer.body,
            "reason": answer.reason.map(ReasonCode::as_str),
            "error": answer.error,
            "public_error": answer.public_error(),
        }))?;
    } else {
        let name = output::shown(name);
        let took = answer.took.as_millis();
        let body = output::shown(answer.body.as_deref().unwrap_or_default());
        let line = match answer.http_status {
            Some(status) => format!("{name} responded with {status} after {took} ms {body}"),
            None => format!("no response from {name} after {took} ms"),
        };
        output::line(line.trim_end())?;
        if has_closed_breaker {
            output::line(format!(
                "the circuit breaker of {name} is closed: its due messages are sent now"
            ))?;
        }
    }
    match (answer.reason, &answer.error) {
        (Some(reason), Some(error)) => bail!("the test failed: {reason} ({error})"),
        _ => Ok(()),
    }
}

/// What may be sent, if the settings allow it.
pub(super) fn sendable<T>(ready: Result<Option<T>, EndpointError>) -> Result<Option<T>> {
    ready.map_err(|error| anyhow!("nothing was sent: {error}"))
}

/// Shows the answer of an endpoint. Fails unless the endpoint is verified.
pub(super) fn verified(name: &str, answer: &EndpointAnswer, json: bool) -> Result<()> {
    let rate = answer.allowed_rate.map(|rate| rate.to_string());
    if json {
        output::json(&json!({
            "verified": answer.is_verified,
            "allowed_rate": rate,
            "took_ms": u64::try_from(answer.took.as_millis())?,
            "reason": answer.reason.map(ReasonCode::as_str),
            "error": answer.error,
            "public_error": answer.public_error(),
        }))?;
    } else if answer.is_verified {
        let rate = rate.map(|rate| format!(", and allows {rate}"));
        output::line(format!(
            "{} is verified{}",
            output::shown(name),
            rate.unwrap_or_default()
        ))?;
    }
    match (answer.reason, &answer.error) {
        (Some(reason), Some(error)) => bail!("not verified: {reason} ({error})"),
        _ => Ok(()),
    }
}

fn parsed<T, E: std::fmt::Display>(
    flag: &str,
    text: Option<&str>,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<Option<T>, ConfigError> {
    let wrong = |error: E| ConfigError::new(flag, error.to_string());
    text.map(parse).transpose().map_err(wrong)
}

/// `503 SERVER_ERROR: …`
fn answer(row: &Delivery) -> String {
    let status = row.http_status.map(|status| status.to_string());
    let error = match (&row.reason, &row.error) {
        (Some(reason), Some(error)) => Some(format!("{reason}: {error}")),
        (reason, _) => reason.clone(),
    };
    let parts: Vec<String> = status.into_iter().chain(error).collect();
    parts.join(" ")
}

fn as_json(row: &Delivery) -> Value {
    json!({
        "message_id": row.message_id.to_string(),
        "topic": row.topic,
        "tenant_id": row.tenant_id.map(|tenant| tenant.to_string()),
        "state": row.state,
        "attempts": row.attempts,
        "http_status": row.http_status,
        "reason": row.reason,
        "error": row.error,
        "public_error": row.public_error(),
        "next_attempt_at": row.next_attempt_at,
        "settled_at": row.settled_at,
        "created_at": row.created_at,
        "can_be_sent_again": row.can_be_sent_again,
    })
}

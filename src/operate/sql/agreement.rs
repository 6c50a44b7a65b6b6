//! The settings that the relays of an outbox must agree on, as recorded in their leases.

use std::collections::BTreeMap;
use std::fmt;

use diesel::PgConnection;
use diesel::pg::data_types::PgTimestamp;
use diesel::prelude::{ExpressionMethods, QueryDsl, RunQueryDsl};
use diesel::result::QueryResult;

use crate::engine::lease::sql::lease::{is_not_over, leases};
use crate::name::OutboxName;
use crate::sql::functions::{MaybeJson, clock_timestamp};
use crate::sql::table::lease;

/// A setting of which running relays have different values, each for longer than two leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Difference {
    /// The variable of the setting.
    pub(crate) setting: String,
    /// Each value with the relays that have it.
    pub(crate) values: Vec<(String, Vec<String>)>,
}

/// `OUTBOX_ON_DEAD is block at a:1, continue at b:1`
impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is ", self.setting)?;
        for (number, (value, relays)) in self.values.iter().enumerate() {
            let separator = if number == 0 { "" } else { ", " };
            let relays = relays.join(" and ");
            write!(f, "{separator}{value} at {relays}")?;
        }
        Ok(())
    }
}

/// A lease, and when it was started and renewed, when it expires, and the time now.
type AgreementRow = (
    i64,
    String,
    MaybeJson,
    (PgTimestamp, PgTimestamp, PgTimestamp, PgTimestamp),
);

/// The settings of which the running relays have different values. A relay counts once its lease is older than two
/// leases, so that a change of one relay after the other is no difference. `of`: only differences that concern this
/// relay.
pub(crate) fn differences(
    conn: &mut PgConnection,
    name: &OutboxName,
    of: Option<i64>,
) -> QueryResult<Vec<Difference>> {
    let times = (
        lease::started_at,
        lease::renewed_at,
        lease::expires_at,
        clock_timestamp(),
    );
    let rows: Vec<AgreementRow> = leases(name)
        .filter(is_not_over())
        .filter(lease::settings.is_not_null())
        .order(lease::id)
        .select((lease::id, lease::relay, lease::settings, times))
        .load(conn)?;
    let read = |(id, relay, json, (started, renewed, expires, now)): AgreementRow| {
        let length = expires.0.saturating_sub(renewed.0);
        let age = now.0.saturating_sub(started.0);
        if age < length.saturating_mul(2) {
            return None;
        }
        let json: Option<String> = json.into();
        let settings: BTreeMap<String, String> = serde_json::from_str(&json?).ok()?;
        Some((id, relay, settings))
    };
    let relays: Vec<(i64, String, BTreeMap<String, String>)> =
        rows.into_iter().filter_map(read).collect();
    Ok(compared(&relays, of))
}

fn compared(
    relays: &[(i64, String, BTreeMap<String, String>)],
    of: Option<i64>,
) -> Vec<Difference> {
    let mut all: BTreeMap<&str, BTreeMap<&str, Vec<String>>> = BTreeMap::new();
    for (_, relay, settings) in relays {
        for (setting, value) in settings {
            let values = all.entry(setting).or_default();
            values.entry(value).or_default().push(relay.clone());
        }
    }
    let has = |setting: &str| {
        let own = relays.iter().find(|(id, ..)| Some(*id) == of);
        of.is_none() || own.is_some_and(|(.., settings)| settings.contains_key(setting))
    };
    let differ = all
        .into_iter()
        .filter(|(setting, values)| values.len() > 1 && has(setting));
    differ
        .map(|(setting, values)| Difference {
            setting: setting.to_owned(),
            values: (values.into_iter())
                .map(|(value, relays)| (value.to_owned(), relays))
                .collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// R69: a relay has an opinion only on settings that it uses.
    #[test]
    fn settings_differ_only_where_two_relays_have_them() {
        let relay = |id: i64, settings: &[(&str, &str)]| {
            let settings = settings
                .iter()
                .map(|(a, b)| ((*a).to_owned(), (*b).to_owned()));
            (id, format!("r{id}"), settings.collect())
        };
        let relays = [
            relay(1, &[("A", "1"), ("B", "x")]),
            relay(2, &[("A", "2")]),
            relay(3, &[("A", "1"), ("B", "x"), ("C", "c")]),
            relay(4, &[("B", "x")]),
        ];
        let all = compared(&relays, None);
        assert_eq!(all.len(), 1);
        assert_eq!(all[0].to_string(), "A is 1 at r1 and r3, 2 at r2");
        assert_eq!(compared(&relays, Some(2)).len(), 1);
        assert_eq!(compared(&relays, Some(4)), []);
    }
}

//! Secrets that receivers share: each of them can sign requests to the others. And secrets at rest.

use std::collections::{BTreeMap, BTreeSet};

use diesel::PgConnection;
use diesel_outbox::config::SigningSecret;
use diesel_outbox::destinations::DestinationError;
use diesel_outbox::{Config, Outbox};
use secrecy::ExposeSecret;

use super::{Finding, bad, good, warning};

const WHAT: &str = "secret";
/// Hosts, or destinations, that a finding names.
const MOST_NAMED: usize = 5;

/// A warning for each group of hosts that verify with the same symmetric secret.
pub(super) fn findings(config: &Config) -> Vec<Finding> {
    let mut hosts_of: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for destination in config.all_destinations() {
        let secrets = match destination.secrets.as_slice() {
            [] => &config.secrets,
            own => own,
        };
        for secret in secrets.iter().filter(|secret| !secret.is_asymmetric()) {
            let hosts = hosts_of.entry(written(secret)).or_default();
            hosts.extend(destination.url.host_str().map(str::to_owned));
        }
    }
    let is_default = |secret: &String| config.secrets.iter().any(|one| written(one) == *secret);
    // Two secrets of a rotation are one matter.
    let mut groups: BTreeMap<BTreeSet<String>, bool> = BTreeMap::new();
    for (secret, hosts) in hosts_of {
        if hosts.len() > 1 {
            *groups.entry(hosts).or_default() |= is_default(&secret);
        }
    }
    groups
        .into_iter()
        .map(|(hosts, is_default)| shared(&hosts, is_default))
        .collect()
}

fn written(secret: &SigningSecret) -> String {
    secret.written().expose_secret().to_owned()
}

fn shared(hosts: &BTreeSet<String>, is_default: bool) -> Finding {
    let what = match is_default {
        true => "OUTBOX_SECRET is",
        false => "one secret is",
    };
    let detail = format!(
        "{what} shared by {} hosts ({}): each of these receivers can forge requests to the others",
        hosts.len(),
        named(hosts),
    );
    Finding {
        advice: Some(
            "give each destination a secret of its own (`diesel-outbox secret new`), or sign so that receivers cannot (`diesel-outbox secret new --asymmetric`)".to_owned(),
        ),
        ..warning(WHAT, detail)
    }
}

/// The first of these.
fn named<'a>(all: impl IntoIterator<Item = &'a String>) -> String {
    let mut all = all.into_iter();
    let mut named: Vec<&str> = all.by_ref().take(MOST_NAMED).map(String::as_str).collect();
    if all.next().is_some() {
        named.push("…");
    }
    named.join(", ")
}

/// How the secrets of registered destinations are stored. Without a key, and without encrypted secrets, there is
/// nothing to say.
pub(super) fn at_rest(conn: &mut PgConnection, config: &Config) -> Vec<Finding> {
    let found = Outbox::new(&config.table.to_string())
        .map_err(anyhow::Error::from)
        .and_then(|outbox| {
            let destinations = outbox.destinations().with_keys(&config.secret_keys);
            destinations
                .encryption(conn)
                .map_err(|error: DestinationError| error.into())
        });
    let found = match found {
        Ok(found) => found,
        Err(error) => return vec![bad(WHAT, error.to_string())],
    };
    let mut findings = Vec::new();
    if !found.unreadable.is_empty() {
        let detail = format!(
            "the secrets of {} registered destinations cannot be read ({}): nothing is sent there",
            found.unreadable.len(),
            named(&found.unreadable),
        );
        findings.push(Finding {
            advice: Some(
                "give the key that they were encrypted with (OUTBOX_SECRET_KEY), or a new secret: `diesel-outbox destination rotate`".to_owned(),
            ),
            ..bad(WHAT, detail)
        });
    }
    if config.secret_keys.is_empty() {
        return findings;
    }
    let old = found.plain + found.older;
    if old > 0 {
        let detail = format!(
            "the secrets of {old} registered destinations are not encrypted with the newest key ({} plain, {} with an older key)",
            found.plain, found.older,
        );
        findings.push(Finding {
            advice: Some("`diesel-outbox destination encrypt` encrypts them".to_owned()),
            ..warning(WHAT, detail)
        });
    } else if found.newest > 0 {
        let detail = format!(
            "the secrets of {} registered destinations are encrypted with the newest key",
            found.newest
        );
        findings.push(good(WHAT, detail));
    }
    findings
}

#[cfg(test)]
mod tests {
    use diesel_outbox::Destination;

    use super::*;

    const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SECOND: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const ASYMMETRIC: &str = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=";

    /// Of destinations at these hosts with these secrets.
    fn details(default: &str, destinations: &[(&str, &[&str])]) -> Vec<String> {
        let mut config = Config::default();
        if !default.is_empty() {
            config.set("OUTBOX_SECRET", default).expect("secrets");
        }
        for (number, (host, secrets)) in destinations.iter().enumerate() {
            let url = format!("https://{host}/{number}");
            let mut one = Destination::new(format!("d{number}"), &url).expect("a URL");
            one.secrets = secrets
                .iter()
                .map(|text| text.parse().expect("a secret"))
                .collect();
            config.destinations.push(one);
        }
        let found = findings(&config);
        found.into_iter().map(|finding| finding.detail).collect()
    }

    #[test]
    fn a_secret_that_receivers_of_several_hosts_share_is_told_once() {
        let rotation = format!("{FIRST} {SECOND}");
        assert_eq!(
            details(
                &rotation,
                &[("a.example", &[]), ("b.example", &[]), ("A.example", &[])]
            ),
            [
                "OUTBOX_SECRET is shared by 2 hosts (a.example, b.example): each of these receivers can forge requests to the others"
            ]
        );
        let own = details(
            "",
            &[("a.example", &[FIRST]), ("b.example", &[SECOND, FIRST])],
        );
        assert!(
            own[0].starts_with("one secret is shared by 2 hosts"),
            "{own:?}"
        );
        let hosts: Vec<String> = (0..9).map(|n| format!("{n}.example")).collect();
        let many: Vec<(&str, &[&str])> = hosts.iter().map(|host| (&**host, &[][..])).collect();
        let many = details(FIRST, &many);
        assert!(
            many[0].contains("9 hosts (0.example") && many[0].contains("4.example, …)"),
            "{many:?}"
        );
    }

    #[test]
    fn secrets_that_no_two_hosts_can_sign_with_are_no_matter() {
        let none: &[&str] = &[];
        for (default, destinations) in [
            ("", [("a.example", none), ("b.example", none)]),
            (FIRST, [("a.example", none), ("a.example", none)]),
            (FIRST, [("a.example", none), ("b.example", &[SECOND][..])]),
            (ASYMMETRIC, [("a.example", none), ("b.example", none)]),
        ] {
            assert_eq!(
                details(default, &destinations),
                Vec::<String>::new(),
                "{default}"
            );
        }
    }
}

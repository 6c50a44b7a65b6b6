//! Secrets shared by receivers, each of which can forge requests to the others; and the encryption of stored secrets.

use diesel::PgConnection;
use diesel_outbox::config::{Config, SigningSecret};
use diesel_outbox::program;
use diesel_outbox::{Destination, Outbox};
use secrecy::ExposeSecret;

use super::{Finding, bad, good, unchecked, warning};

const WHAT: &str = "secret";
/// The most hosts or destinations that a finding names.
const MOST_NAMED: usize = 5;

/// A warning for each group of hosts that verify with the same symmetric secret.
pub(super) fn findings(config: &Config) -> Vec<Finding> {
    let destinations = program::all_destinations(config);
    let (mut seen, mut groups) = (Vec::new(), Vec::<(Vec<&str>, bool)>::new());
    for secret in destinations.iter().flat_map(|one| secrets(one, config)) {
        let text = written(secret);
        if has_public_key(secret) || seen.contains(&text) {
            continue;
        }
        let has_it = |secrets: &[SigningSecret]| secrets.iter().any(|one| written(one) == text);
        let mut hosts: Vec<&str> = destinations
            .iter()
            .filter(|one| has_it(secrets(one, config)))
            .filter_map(|one| one.url.host_str())
            .collect();
        hosts.sort_unstable();
        hosts.dedup();
        let is_default = has_it(&config.secrets);
        // Two secrets of a rotation make one finding.
        match groups.iter_mut().find(|(group, _)| *group == hosts) {
            Some((_, is_of_default)) => *is_of_default |= is_default,
            None if hosts.len() > 1 => groups.push((hosts, is_default)),
            None => {}
        }
        seen.push(text);
    }
    groups
        .iter()
        .map(|(hosts, is_default)| shared(hosts, *is_default))
        .collect()
}

/// The secrets that requests to a destination are signed with.
fn secrets<'a>(destination: &'a Destination, config: &'a Config) -> &'a [SigningSecret] {
    match destination.secrets.as_slice() {
        [] => &config.secrets,
        own => own,
    }
}

/// Whether receivers verify with a public key.
fn has_public_key(secret: &SigningSecret) -> bool {
    !matches!(secret.public_key(), Ok(None))
}

fn written(secret: &SigningSecret) -> String {
    secret.written().expose_secret().to_owned()
}

fn shared(hosts: &[&str], is_default: bool) -> Finding {
    let what = match is_default {
        true => "OUTBOX_SECRET is",
        false => "one secret is",
    };
    let detail = format!(
        "{what} shared by {} hosts ({}): each of these receivers can forge requests to the others",
        hosts.len(),
        named(hosts),
    );
    warning(WHAT, detail).advise(
        "give each destination its own secret (`diesel-outbox secret new`), or use an asymmetric secret, with which receivers cannot sign (`diesel-outbox secret new --asymmetric`)",
    )
}

/// The first [`MOST_NAMED`] names.
fn named(all: &[impl AsRef<str>]) -> String {
    let mut named: Vec<&str> = all.iter().take(MOST_NAMED).map(AsRef::as_ref).collect();
    if all.len() > MOST_NAMED {
        named.push("…");
    }
    named.join(", ")
}

/// How the secrets of endpoints are stored. Without a key and without encrypted secrets, there are no
/// findings.
pub(super) fn at_rest(conn: &mut PgConnection, config: &Config) -> Vec<Finding> {
    let outbox = Outbox::from(config.table.clone());
    let destinations = outbox.endpoints().with_keys(&config.secret_keys);
    let found = match program::or_none(destinations.encryption(conn)) {
        Ok(found) => found,
        Err(error) => return vec![unchecked(WHAT, &error)],
    };
    let mut findings = Vec::new();
    if !found.unreadable.is_empty() {
        let detail = format!(
            "the secrets of {} endpoints cannot be read ({}): nothing is sent to them",
            found.unreadable.len(),
            named(&found.unreadable),
        );
        findings.push(bad(WHAT, detail).advise(
            "set OUTBOX_SECRET_KEY to the key that encrypted the secrets, or replace the secrets: `diesel-outbox endpoint rotate NAME --keep 0s`, and `endpoint put NAME --auth` if the destination has authentication",
        ));
    }
    if config.secret_keys.is_empty() {
        return findings;
    }
    let old = found.plain + found.older;
    if old > 0 {
        let detail = format!(
            "the secrets of {old} endpoints are not encrypted with the newest key ({} plain, {} with an older key)",
            found.plain, found.older,
        );
        let advice = "`diesel-outbox endpoint encrypt` encrypts them";
        findings.push(warning(WHAT, detail).advise(advice));
    } else if found.newest > 0 {
        let detail = format!(
            "the secrets of {} endpoints are encrypted with the newest key",
            found.newest
        );
        findings.push(good(WHAT, detail));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SECOND: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
    const ASYMMETRIC: &str = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=";

    /// The findings about destinations at these hosts with these secrets.
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
    fn a_secret_that_receivers_of_several_hosts_share_is_reported_once() {
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

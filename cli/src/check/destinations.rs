//! One line for each destination, and warnings about settings that may be unintended.

use std::collections::BTreeMap;

use diesel_outbox::Destination;
use diesel_outbox::config::{Config, Mode, Proxy, Roots};
use diesel_outbox::program::{self, PolicyOption};
use serde_json::{Value, json};
use url::Host;

use super::{Finding, good, routes, warning};

const WHAT: &str = "destination";
/// The options that the line of a destination always has. Of the others, it has those that the destination sets.
const SAID: [&str; 5] = ["mode", "concurrency", "rate", "burst", "breaker"];
/// Domains of private networks.
const PRIVATE_NAMES: [&str; 8] = [
    "localhost",
    "internal",
    "local",
    "lan",
    "home.arpa",
    "test",
    "svc",
    "intranet",
];

pub(super) fn findings(config: &Config) -> Vec<Finding> {
    let destinations = program::all_destinations(config);
    let of_each = destinations.iter().flat_map(|destination| {
        let name = &destination.name;
        let line = good(WHAT, format!("{name}: {}", line(destination, config)));
        let warnings = warnings(destination, config).into_iter();
        let warnings = warnings.map(move |text| warning(WHAT, format!("{name}: {text}")));
        std::iter::once(line).chain(warnings)
    });
    of_each.collect()
}

pub(super) fn as_json(config: &Config) -> Value {
    let destination = |d: &Destination| {
        json!({
            "name": d.name,
            "url": program::shown_url(d),
            "mode": mode(d, config).to_string(),
            "secrets": secrets(d, config),
            "auth": d.auth.as_ref().map(|auth| BTreeMap::from_iter(program::shown_auth(auth))),
            "concurrency": concurrency(d, config),
            "rate": d.policy.rate.map(|r| json!({ "per_second": r.per_second, "burst": r.burst })),
            "breaker": d.policy.breaker.is_some(),
            "policy": d.policy,
            "addresses": addresses(d, config),
            "tls": tls(d, config),
            "proxy": proxy(d, config).to_string(),
            "routed": routes::lead_to(config, &d.name),
            "warnings": warnings(d, config),
        })
    };
    program::all_destinations(config)
        .iter()
        .map(destination)
        .collect()
}

fn line(destination: &Destination, config: &Config) -> String {
    let signed = match secrets(destination, config) {
        0 => "unsigned".to_owned(),
        1 => "signed with 1 secret".to_owned(),
        count => format!("signed with {count} secrets"),
    };
    let signed = match &destination.auth {
        None => signed,
        Some(auth) => format!("{signed}, authentication: {auth}"),
    };
    let threads = match concurrency(destination, config) {
        1 => "1 thread".to_owned(),
        count => format!("{count} threads"),
    };
    let rate = destination.policy.rate.map_or_else(
        || "no rate limit".to_owned(),
        |rate| format!("{}/s (burst {})", rate.per_second, rate.burst),
    );
    let breaker = destination.policy.breaker.map_or_else(
        || "no breaker".to_owned(),
        |breaker| {
            format!(
                "breaker opens if {} % of at least {} sends in {} fail",
                breaker.failure_ratio * 100.0,
                breaker.min_sends,
                humantime::format_duration(breaker.window)
            )
        },
    );
    let proxy = match proxy(destination, config) {
        Proxy::Direct => "no proxy".to_owned(),
        via => format!("proxy {via}"),
    };
    let mut parts = vec![
        program::shown_url(destination),
        shown_mode(destination, config),
        signed,
        threads,
        rate,
        breaker,
    ];
    let others = PolicyOption::ALL.iter();
    let others = others.filter(|option| !SAID.contains(&option.name));
    parts.extend(others.filter_map(|option| {
        let text = option.text(&destination.policy)?;
        Some(format!("{} {text}", option.name))
    }));
    parts.extend([
        addresses(destination, config),
        tls(destination, config),
        proxy,
    ]);
    parts.join(", ")
}

fn warnings(destination: &Destination, config: &Config) -> Vec<&'static str> {
    let is_signed = secrets(destination, config) > 0;
    let mut warnings = Vec::new();
    if is_signed && destination.url.scheme() == "http" && is_public(destination) {
        warnings
            .push("requests are signed, but http:// to a public host is not private: use https://");
    }
    if destination.auth.is_some() && destination.url.scheme() == "http" && is_public(destination) {
        warnings.push("the receiver asks for authentication, but http:// to a public host is not private: use https://");
    }
    if is_signed && mode(destination, config) == Mode::Binary {
        warnings.push("headers are not signed: consider structured mode");
    }
    if !routes::lead_to(config, &destination.name) {
        warnings
            .push("no route leads to this destination: only messages that name it are sent there");
    }
    warnings
}

/// Judged by the URL alone: names are not resolved.
fn is_public(destination: &Destination) -> bool {
    if destination.internal == Some(true) {
        return false;
    }
    match destination.url.host() {
        Some(Host::Ipv4(ip)) => {
            !(ip.is_loopback() || ip.is_private() || ip.is_link_local() || ip.is_unspecified())
        }
        Some(Host::Ipv6(ip)) => {
            let is_own = ip.is_unique_local() || ip.is_unicast_link_local();
            !(is_own || ip.is_loopback() || ip.is_unspecified())
        }
        Some(Host::Domain(name)) => {
            let name = name.trim_end_matches('.');
            let is_under = |parent: &&str| {
                let before = name.strip_suffix(*parent);
                before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
            };
            // A name without a dot belongs to the local network.
            name.contains('.') && !PRIVATE_NAMES.iter().any(is_under)
        }
        None => false,
    }
}

fn mode(destination: &Destination, config: &Config) -> Mode {
    destination.policy.mode.unwrap_or(config.mode)
}

fn shown_mode(destination: &Destination, config: &Config) -> String {
    let mode = mode(destination, config);
    if mode != Mode::Batched {
        return mode.to_string();
    }
    let batch = destination.request_batch;
    let linger = humantime::format_duration(batch.linger);
    format!("{mode} (up to {} in {linger})", batch.size)
}

/// The number of secrets that requests are signed with.
fn secrets(destination: &Destination, config: &Config) -> usize {
    match destination.secrets.len() {
        0 => config.secrets.len(),
        own => own,
    }
}

fn concurrency(destination: &Destination, config: &Config) -> usize {
    destination.policy.concurrency.unwrap_or(config.concurrency)
}

/// The addresses that the destination may resolve to.
fn addresses(destination: &Destination, config: &Config) -> String {
    let allow: Vec<String> = destination.allow.iter().map(ToString::to_string).collect();
    let is_public_only = config.public_only || !allow.is_empty();
    match destination.internal {
        Some(true) => "internal (any address)".to_owned(),
        None if !is_public_only => "any address except link-local".to_owned(),
        Some(false) | None if allow.is_empty() => "public addresses only".to_owned(),
        Some(false) | None => format!("public addresses and {} only", allow.join(" ")),
    }
}

fn tls(destination: &Destination, config: &Config) -> String {
    if destination.url.scheme() != "https" {
        return "no TLS".to_owned();
    }
    let tls = &destination.tls;
    let roots: &Roots = tls.roots.as_ref().unwrap_or(&config.tls_roots);
    let mut text = format!("TLS from {} with {roots} roots", tls.min_version);
    if let Some(path) = &tls.client_cert_file {
        text += &format!(" and the client certificate {}", path.display());
    }
    text
}

/// Never falls back: a proxy setting that cannot be read has already ended `check`.
fn proxy(destination: &Destination, config: &Config) -> Proxy {
    program::proxy_of(config, destination).unwrap_or(Proxy::Direct)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_of_ones_own_network_are_not_public() {
        for (host, expected) in [
            ("shop.example", true),
            ("internal.example", true),
            ("notinternal", false),
            ("billing", false),
            ("billing.internal", false),
            ("billing.internal.", false),
            ("shop.notinternal", true),
            ("billing.shop.svc.cluster.local", false),
            ("localhost", false),
            ("127.0.0.1", false),
            ("10.0.0.7", false),
            ("203.0.113.7", true),
            ("[::1]", false),
            ("[fd00::7]", false),
            ("[2001:db8::7]", true),
        ] {
            let url = format!("http://{host}/");
            let mut destination = Destination::new("a", &url).expect(host);
            assert_eq!(is_public(&destination), expected, "{host}");
            destination.internal = Some(true);
            assert!(!is_public(&destination), "{host}");
        }
    }
}

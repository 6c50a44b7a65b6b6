//! Every error names its key and the expected values, and shows no value.

use super::tests::read;
use super::*;

#[track_caller]
fn refused(text: &str, key: &str, reason: &str) {
    let error = read(text).expect_err(text);
    assert_eq!(error.key(), key, "{error}");
    assert!(error.reason().contains(reason), "{error}");
}

#[test]
fn errors_outside_of_destinations_name_their_key() {
    for (text, key, reason) in [
        ("batch = ", "not TOML", "line 1, at the key batch"),
        ("batch = 1\nbatch = 2", "not TOML", "line 2"),
        ("bacth = 5", "bacth", "did you mean batch?"),
        ("OUTBOX_BATCH = 5", "OUTBOX_BATCH", "did you mean batch?"),
        (
            "destination = {}",
            "destination",
            "did you mean destinations?",
        ),
        ("whatever = 5", "whatever", "lease, "),
        (
            "batch = 1.5",
            "batch",
            "expected a whole number, found float",
        ),
        ("batch = true", "batch", "boolean"),
        ("cleaner = 1", "cleaner", "true or false"),
        ("source = 5", "source", "expected text"),
        ("url = ['http://a']", "url", "array"),
        ("lease = 60", "lease", "expected text"),
        ("lease = 'soon'", "lease", "it is not a duration"),
        ("batch = 0", "batch", "from 1 to 10000"),
        ("config = 'x'", "config", "cannot name another"),
        ("routes = 5", "routes", "[[routes]]"),
        ("[routes]\ntopic = 'a'", "routes", "[[routes]]"),
        ("[[routes]]\ntopic = 'a'", "routes[0].to", "missing"),
        ("[[routes]]\nto = 'a'", "routes[0].topic", "missing"),
        (
            "[[routes]]\ntopic = ''\nto = 'a'",
            "routes[0].topic",
            "empty",
        ),
        ("[[routes]]\ntopic = 'a'\nto = []", "routes[0].to", "empty"),
        (
            "[[routes]]\ntopic = 'a'\nto = ['a', 1]",
            "routes[0].to[1]",
            "integer",
        ),
        ("[[routes]]\ntopic = 'a'\nto = 1", "routes[0].to", "integer"),
        (
            "[[routes]]\ntopics = 'a'",
            "routes[0].topics",
            "did you mean topic?",
        ),
        ("destinations = 5", "destinations", "[destinations.NAME]"),
        ("destinations.a = 5", "destinations.a", "a table"),
        (
            "destinations.''.url = 'http://a'",
            "destinations.\"\"",
            "name",
        ),
        ("destinations.a = {}", "destinations.a.url", "missing"),
        ("secret = []", "secret", "empty"),
        (
            "secret = 'x'\nsecret_file = 'y'",
            "secret_file",
            "secret is also set",
        ),
        (
            "database_url = 'x'\ndatabase_url_file = 'y'",
            "database_url_file",
            "database_url is also set",
        ),
        (
            "secret_file = '/nowhere/x'",
            "secret_file",
            "\"/nowhere/x\"",
        ),
        (
            "database_url_file = 'nowhere'",
            "database_url_file",
            "working directory",
        ),
    ] {
        refused(text, key, reason);
    }
}

#[test]
fn errors_in_a_destination_name_their_key() {
    for (lines, key, reason) in [
        ("urll = ''", "urll", "did you mean url?"),
        ("secrets = ''", "secrets", "did you mean secret?"),
        ("colour = 'red'", "colour", "max_payload"),
        ("\"a b\" = 1", "\"a b\"", "unknown key"),
        ("url = 'a'", "url", "not a URL"),
        ("url = 'ftp://a'", "url", "https://shop.example"),
        ("url = 5", "url", "integer"),
        ("url_file = 'nowhere'", "url_file", "working directory"),
        (
            "url = 'http://a'\nurl_file = 'x'",
            "url_file",
            "url is also set",
        ),
        ("secret = 'x'", "secret", "secret 1: must start with whsec_"),
        ("secret = ['']", "secret[0]", "empty"),
        ("secret = [1]", "secret[0]", "integer"),
        ("secret = []", "secret", "empty"),
        (
            "secret = 'x'\nsecret_file = 'y'",
            "secret_file",
            "secret is also set",
        ),
        (
            "secret_file = 'nowhere'",
            "secret_file",
            "working directory",
        ),
        (
            "secret_file = '/nowhere/x'",
            "secret_file",
            "\"/nowhere/x\"",
        ),
        ("secret_file = '/dev/null'", "secret_file", "empty"),
        (
            "secret_file = '/dev/zero'",
            "secret_file",
            "more than 65536 bytes",
        ),
        (
            "mode = 'Binary'",
            "mode",
            "not binary, structured or batched",
        ),
        ("batch_size = 0", "batch_size", "from 1 to 10000"),
        ("batch_linger = '11s'", "batch_linger", "longer than 10s"),
        ("headers = 5", "headers", "a table"),
        ("headers.x = 5", "headers.x", "{ file = \"path\" }"),
        (
            "headers.x.file = 'nowhere'",
            "headers.x.file",
            "working directory",
        ),
        (
            "headers.x.flie = 'nowhere'",
            "headers.x.flie",
            "did you mean file?",
        ),
        ("headers.x = '1'\nheaders.X = '2'", "headers.x", "twice"),
        ("timeout = '0s'", "timeout", "1ms or longer"),
        (
            "timeout = 5",
            "timeout",
            "a duration such as 500ms or 2h, in quotes, found integer",
        ),
        ("concurrency = 0", "concurrency", "from 1 to 1024"),
        ("concurrency = 1025", "concurrency", "from 1 to 1024"),
        (
            "concurrency = 'eight'",
            "concurrency",
            "expected a whole number, found string",
        ),
        ("rate = 0", "rate", "at least 1 in 24 h"),
        ("rate = -1", "rate", "at least 1 in 24 h"),
        ("rate = nan", "rate", "a number"),
        ("rate = inf", "rate", "a number"),
        ("rate = 1e6", "rate", "below 1000000"),
        ("rate = '5'", "rate", "not a rate such as 10/s"),
        ("burst = 5", "burst", "rate"),
        ("rate = 5\nburst = 0", "burst", "from 1"),
        ("max_attempts = 0", "max_attempts", "from 1"),
        ("max_attempts = 99999999999", "max_attempts", "too large"),
        ("max_attempts = -1", "max_attempts", "from 1"),
        (
            "backoff = 'exponential(5s)'",
            "backoff",
            "exponential(base, cap)",
        ),
        ("retry_after_cap = 'long'", "retry_after_cap", "duration"),
        ("breaker = 5", "breaker", "false or a table"),
        (
            "breaker.windw = '5s'",
            "breaker.windw",
            "did you mean window?",
        ),
        (
            "breaker.failure_ratio = 0",
            "breaker.failure_ratio",
            "above 0",
        ),
        (
            "breaker.failure_ratio = 1.01",
            "breaker.failure_ratio",
            "at most 1",
        ),
        (
            "breaker.failure_ratio = nan",
            "breaker.failure_ratio",
            "a number",
        ),
        ("breaker.min_sends = 0", "breaker.min_sends", "from 1"),
        ("breaker.window = '0s'", "breaker.window", "1ms"),
        (
            "breaker.open = '6m'",
            "breaker.open",
            "open_cap, which is 5m",
        ),
        ("classes = 'dead'", "classes", "a table"),
        (
            "classes.404 = 'gone'",
            "classes.404",
            "not retry, dead or pause",
        ),
        ("classes.500 = 'dead'", "classes.500", "from 400 to 499"),
        ("classes.4xx = 'dead'", "classes.4xx", "from 400 to 499"),
        ("max_payload = 0", "max_payload", "from 1 to 1048576"),
        ("max_payload = '2MiB'", "max_payload", "from 1 to 1048576"),
        ("max_payload = '1 kB'", "max_payload", "64KiB"),
        ("max_payload = 1.5", "max_payload", "a number of bytes"),
        ("internal = 'yes'", "internal", "true or false"),
        ("allow = ['10.0.0.0/8', 'x']", "allow[1]", "a network"),
        ("allow = '10.0.0.0/33'", "allow[0]", "a network"),
        (
            "internal = true\nallow = ['::1']",
            "allow",
            "remove internal or allow",
        ),
        ("https_only = 1", "https_only", "true or false"),
        ("tls.root = 'system'", "tls.root", "did you mean roots?"),
        ("tls.roots = ''", "tls.roots", "empty"),
        ("tls.min_version = 1.1", "tls.min_version", "not 1.2 or 1.3"),
        ("proxy = 'proxy:3128'", "proxy", "http://proxy.example:3128"),
    ] {
        let text = match lines {
            lines if lines.starts_with("url") => lines.to_owned(),
            lines => format!("url = 'http://a'\n{lines}"),
        };
        let key = format!("destinations.a.{key}");
        refused(&format!("[destinations.a]\n{text}"), &key, reason);
    }
}

#[test]
fn a_line_that_is_not_toml_is_named_and_not_shown() {
    let text = "batch = 5\ndatabase_url = \"postgres://u:hunter22@db/shop\nlease = \"5s\"";
    let error = read(text).expect_err("no quote").to_string();
    assert!(error.contains("line 2, at the key database_url"), "{error}");
    assert!(!error.contains("hunter22"), "{error}");

    let text = "secret = [\n  \"whsec_hunter22=\" \"x\"\n]";
    let error = read(text).expect_err("no comma").to_string();
    assert!(error.contains("line 2"), "{error}");
    assert!(!error.contains("hunter22"), "{error}");
}

#[test]
fn a_secret_in_the_wrong_place_is_not_shown() {
    for line in [
        "mode = 'hunter22'",
        "timeout = '2hunter22'",
        "backoff = 'hunter22'",
        "url = 'hunter22://a'",
        "proxy = 'hunter22://a'",
        "secret_file = 'hunter22'",
        "whsec_hunter22 = 1",
        "max_payload = 'hunter22'",
        "tls.min_version = 'hunter22'",
        "classes.404 = 'hunter22'",
        "allow = 'hunter22'",
    ] {
        let text = format!("[destinations.a]\nurl = 'http://a'\n{line}")
            .replace("url = 'http://a'\nurl", "url");
        let error = read(&text).expect_err(line).to_string();
        assert!(!error.contains("hunter22"), "{error}");
    }
    for setting in SETTINGS {
        let text = format!("{} = 'hunter22://hunter22 hunter22'", key_of(setting));
        if let Err(error) = read(&text) {
            assert!(!error.to_string().contains("hunter22"), "{error}");
        }
    }
}

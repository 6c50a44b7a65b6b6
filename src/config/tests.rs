//! Reading settings, one by one and from all sources.

use super::environment::{is_relevant, of};
use super::*;

#[test]
fn the_defaults_are_valid() {
    let config = Config::default();
    assert_eq!(config.concurrency, 16);
    assert_eq!(config.send_timeout, Duration::from_millis(2500));
    assert_eq!(config.validate(), Ok(()));
}

#[test]
fn a_bad_value_is_an_error_that_names_the_setting() {
    for (variable, value) in [
        ("OUTBOX_LEASE", "soon"),
        ("OUTBOX_LEASE", "99999999999999999h"),
        ("OUTBOX_INBOX_RETENTION", "never"),
        ("OUTBOX_BATCH", "0"),
        ("OUTBOX_BATCH", "-1"),
        ("OUTBOX_CONCURRENCY", "many"),
        ("OUTBOX_ENABLED", "yes"),
        ("OUTBOX_TABLE", "a b"),
        ("OUTBOX_URL", "ftp://example.com"),
        ("OUTBOX_URL", "example.com"),
        ("OUTBOX_BACKOFF", "5"),
        ("OUTBOX_LOG_FORMAT", "xml"),
        ("OUTBOX_SECRET", "whsec_x"),
        ("OUTBOX_MODE", "chunked"),
        ("OUTBOX_SOURCE", "a b"),
        ("OUTBOX_PROXY", "proxy:3128"),
        ("OUTBOX_LAESE", "5s"),
    ] {
        let error = Config::default().set(variable, value).expect_err(value);
        assert_eq!(error.key(), variable);
    }
}

/// R66: two handlers of one group are two handlers.
#[test]
#[cfg(feature = "relay")]
fn the_summary_counts_handlers() {
    let mut config = Config::default();
    config.in_process.push(InProcess {
        topics: vec!["a".to_owned(), "b".to_owned()],
        ..InProcess::default()
    });
    assert!(config.summary().contains("handlers=2"));
}

/// `file::refusals` tests the other checks.
#[test]
fn a_destination_made_in_code_is_checked_like_a_destination_of_the_file() {
    let mut config = Config::default();
    let destination = Destination::new("a", "http://a.example").expect("a URL");
    config
        .destinations
        .push(destination.configure(|destination| destination.policy.concurrency = Some(0)));
    let error = config.validate().expect_err("no threads");
    assert_eq!(error.key(), "destinations.a.concurrency");
}

#[test]
fn a_value_set_in_code_has_the_range_of_its_setting() {
    type Change = fn(&mut Config);
    let cases: [(&str, Change); 6] = [
        ("OUTBOX_CONCURRENCY", |config| config.concurrency = 0),
        ("OUTBOX_BATCH", |config| config.batch = 10_001),
        ("OUTBOX_BATCH", |config| config.batch = usize::MAX),
        ("OUTBOX_MAX_ATTEMPTS", |config| config.max_attempts = 0),
        ("OUTBOX_POLL_INTERVAL", |config| {
            config.poll_interval = Duration::ZERO;
        }),
        ("OUTBOX_LEASE", |config| config.lease = Duration::ZERO),
    ];
    for (variable, change) in cases {
        let mut config = Config::default();
        change(&mut config);
        let error = config.validate().expect_err(variable);
        assert_eq!(error.key(), variable);
    }
}

#[test]
fn the_error_of_a_misspelt_setting_suggests_the_right_name() {
    let error = Config::default()
        .set("OUTBOX_LAESE", "5s")
        .expect_err("unknown");
    assert!(error.to_string().contains("OUTBOX_LEASE"), "{error}");
}

#[test]
fn a_lease_shorter_than_two_sends_is_a_contradiction() {
    let mut config = Config::default();
    config.set("OUTBOX_LEASE", "4s").expect("a duration");
    let error = config.validate().expect_err("too short").to_string();
    assert!(
        error.contains("OUTBOX_LEASE") && error.contains("OUTBOX_SEND_TIMEOUT"),
        "{error}"
    );
}

#[test]
fn an_inbox_that_forgets_at_once_is_refused() {
    let mut config = Config::default();
    config.set("OUTBOX_INBOX_RETENTION", "0s").expect("a time");
    let error = config.validate().expect_err("too short");
    assert_eq!(error.key(), "OUTBOX_INBOX_RETENTION");
    config.set("OUTBOX_INBOX_RETENTION", "30d").expect("a time");
    assert_eq!(config.validate(), Ok(()));
}

#[test]
fn the_reference_lists_every_setting_with_its_default() {
    let page = include_str!("../../docs/settings.md");
    for setting in SETTINGS {
        let default = match setting.default {
            "" => String::new(),
            default => format!("`{default}`"),
        };
        let row = format!(
            "| `{}` | {default} | {} |",
            setting.variable, setting.summary
        );
        assert!(page.contains(&row), "docs/settings.md has no row {row}");
        let of_file = format!("; or {}_FILE", setting.variable);
        let names_file = setting.summary.ends_with(&of_file);
        assert_eq!(names_file, setting.place == SettingPlace::OwnFile, "{row}");
    }
}

#[test]
fn the_reference_lists_every_option_of_a_policy() {
    let page = include_str!("../../docs/settings.md");
    for option in PolicyOption::ALL {
        let start = format!("| `{}` | ", option.name);
        let row = page.lines().find(|line| line.starts_with(&start));
        let row = row.unwrap_or_else(|| panic!("docs/settings.md has no row of {}", option.name));
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let registered = option.registered_default().unwrap_or("none");
        assert_eq!(cells[2].trim_matches('`'), option.default, "{row}");
        assert_eq!(cells[3].trim_matches('`'), registered, "{row}");
        assert_eq!(cells[4], option.help, "{row}");
    }
}

#[test]
fn no_password_is_shown() {
    let mut config = Config::default();
    config
        .set("DATABASE_URL", "postgres://app:hunter2@db/shop")
        .expect("a URL");
    config
        .set("OUTBOX_URL", "https://u:hunter2@example.com/?token=hunter2")
        .expect("a URL");
    assert!(!format!("{config:?}").contains("hunter2"));
    config
        .set("DATABASE_URL", "host=db password=hunter2 dbname=shop")
        .expect("pairs");
    assert!(!format!("{config:?}").contains("hunter2"));
    assert!(format!("{config:?}").contains("host=db dbname=shop"));
}

#[test]
fn kubernetes_service_links_are_not_settings() {
    assert!(!is_relevant("OUTBOX_PORT_8080_TCP_ADDR"));
    assert!(!is_relevant("OUTBOX_SERVICE_HOST"));
    assert!(is_relevant("OUTBOX_POLL_INTERVAL"));
}

/// The library reads the same sources as the binary, and the environment wins.
#[cfg(feature = "file")]
#[test]
fn the_environment_wins_over_the_file_that_it_names() {
    let unique = uuid::Uuid::now_v7().simple();
    let path = std::env::temp_dir().join(format!("outbox-{unique}.toml"));
    let text = "batch = 7\nconcurrency = 3\n[destinations.a]\nurl = 'http://a.example/'\n\
                [[routes]]\ntopic = 't'\nto = 'a'";
    std::fs::write(&path, text).expect("a file");
    let pairs = |batch: &str| {
        let file = path.display().to_string();
        [("OUTBOX_BATCH", batch.to_owned()), ("OUTBOX_CONFIG", file)]
            .map(|(name, value)| (name.to_owned(), value))
    };
    let config = of(&pairs("9")).expect("settings");
    assert_eq!((config.batch, config.concurrency), (9, 3));
    assert_eq!(config.destinations[0].name, "a");
    assert_eq!(Config::from_file(&path).expect("settings").batch, 7);
    // A contradiction is an error, even if each part alone is valid.
    std::fs::write(&path, "[[routes]]\ntopic = 't'\nto = 'b'").expect("a file");
    let error = Config::from_file(&path).expect_err("no such destination");
    assert!(error.to_string().contains('b'), "{error}");
    std::fs::remove_file(&path).expect("removed");
    let error = of(&pairs("9")).expect_err("no file");
    assert!(error.to_string().contains("cannot read"), "{error}");
}

use std::time::{Duration, UNIX_EPOCH};

use diesel_outbox::config::Config;
use diesel_outbox::receive::{Headers, Verifier};
use diesel_outbox::{Destination, HttpDispatcher};
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, RootCertStore};

const PUBLIC_KEY: &str = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=";
const PRIVATE_KEY: &str = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=";

/// One test only: the provider is global to the process.
#[test]
fn the_applications_own_tls_works_beside_the_library_which_uses_the_same_provider() {
    let mut config = Config::default();
    config.destinations =
        vec![Destination::new("billing", "http://billing.example").expect("a URL")];
    config
        .set("OUTBOX_SECRET", PRIVATE_KEY)
        .expect("a private key");
    HttpDispatcher::new(&config).expect("plain HTTP and signatures need no provider");
    let headers = Headers::new([
        ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
        ("webhook-timestamp", "1614265330"),
        (
            "webhook-signature",
            "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg==",
        ),
    ]);
    let then = UNIX_EPOCH + Duration::from_secs(1_614_265_331);
    let verifier: Verifier = PUBLIC_KEY.parse().expect("a key");
    let body = br#"{"test": 2432232314}"#;
    assert!(verifier.at(then).verify(&headers, body).is_ok());

    config.destinations =
        vec![Destination::new("billing", "https://billing.example").expect("a URL")];
    let refused = HttpDispatcher::new(&config).expect_err("no provider is chosen yet");
    let refused = refused.to_string();
    assert!(
        refused.starts_with("destinations.billing.url: "),
        "{refused}"
    );
    assert!(refused.contains("`ring` or `aws-lc-rs`"), "{refused}");
    assert!(
        CryptoProvider::get_default().is_none(),
        "the library chose a provider for the process"
    );

    // This call once panicked: "Could not automatically determine the process-level CryptoProvider".
    let _ = ClientConfig::builder().with_root_certificates(RootCertStore::empty());
    assert!(CryptoProvider::get_default().is_some());
    HttpDispatcher::new(&config).expect("the application's provider");
}

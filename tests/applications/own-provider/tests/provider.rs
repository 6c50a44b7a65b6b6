use diesel_outbox::{Config, Destination, HttpDispatcher};
use rustls::crypto::CryptoProvider;
use rustls::{ClientConfig, RootCertStore};

/// One test, for the provider is the process's.
#[test]
fn the_applications_own_tls_works_beside_the_library_which_uses_the_same_provider() {
    let mut config = Config::default();
    config.destinations =
        vec![Destination::new("billing", "http://billing.example").expect("a URL")];
    HttpDispatcher::new(&config).expect("plain HTTP needs no provider");

    config.destinations =
        vec![Destination::new("billing", "https://billing.example").expect("a URL")];
    let refused = HttpDispatcher::new(&config).expect_err("nobody has chosen a provider yet");
    let refused = refused.to_string();
    assert!(
        refused.starts_with("destinations.billing.url: "),
        "{refused}"
    );
    assert!(refused.contains("`ring` or `aws-lc-rs`"), "{refused}");
    assert!(
        CryptoProvider::get_default().is_none(),
        "the library chose one for the process"
    );

    // It panicked: "Could not automatically determine the process-level CryptoProvider".
    let _ = ClientConfig::builder().with_root_certificates(RootCertStore::empty());
    assert!(CryptoProvider::get_default().is_some());
    HttpDispatcher::new(&config).expect("the application's provider");
}

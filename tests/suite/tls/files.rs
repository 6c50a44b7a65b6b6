//! TLS files that cannot be used.

use diesel_outbox::config::{Config, Roots};
use diesel_outbox::{Destination, HttpDispatcher};

use super::ground::Authority;

fn refused(destination: Destination) -> (String, String) {
    let mut config = Config::default();
    config.destinations = vec![destination];
    let error = HttpDispatcher::new(&config).expect_err("a file that cannot be used");
    (error.key().to_owned(), error.to_string())
}

#[test]
fn a_file_that_cannot_be_used_is_an_error_at_start_that_names_key_path_and_reason() {
    let authority = Authority::new();
    let good = authority.known_as("relay", 1);
    authority.sign("other", "extendedKeyUsage=clientAuth");
    authority.openssl("pkey -in relay.key -aes256 -passout pass:secret -out encrypted.key");
    authority.openssl("ec -in relay.key -aes256 -passout pass:secret -out legacy.key");
    authority.write("empty.pem", b"");
    authority.write("text.pem", b"hello\n");
    authority.write(
        "damaged.pem",
        b"-----BEGIN CERTIFICATE-----\n???\n-----END CERTIFICATE-----\n",
    );
    authority.write(
        "nonsense.pem",
        b"-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n",
    );
    authority.write(
        "nonsense.key",
        b"-----BEGIN PRIVATE KEY-----\naGVsbG8=\n-----END PRIVATE KEY-----\n",
    );
    let half = authority.read("relay.key");
    authority.write("half.key", &half[..half.len() / 2]);

    for (setting, file, reason) in [
        ("roots", "gone.pem", "cannot read"),
        ("roots", "empty.pem", "no certificate found"),
        ("roots", "text.pem", "no certificate found"),
        ("roots", "ca.key", "no certificate found"),
        ("roots", "damaged.pem", "a section is not base64"),
        ("roots", "nonsense.pem", "certificate 1 cannot be used"),
        ("client_cert_file", "gone.pem", "cannot read"),
        ("client_cert_file", "empty.pem", "no certificate found"),
        (
            "client_cert_file",
            "nonsense.pem",
            "certificate 1 cannot be used",
        ),
        ("client_key_file", "gone.key", "cannot read"),
        ("client_key_file", "relay.pem", "no private key found"),
        ("client_key_file", "half.key", "a section has no END line"),
        ("client_key_file", "nonsense.key", "the key cannot be used"),
        ("client_key_file", "encrypted.key", "the key is encrypted"),
        ("client_key_file", "legacy.key", "the key is encrypted"),
        (
            "client_key_file",
            "other.key",
            "the key does not belong to the certificate",
        ),
    ] {
        let path = authority.path(file);
        let mut destination = good.clone();
        match setting {
            "roots" => destination.tls.roots = Some(Roots::File(path.clone())),
            "client_cert_file" => destination.tls.client_cert_file = Some(path.clone()),
            _ => destination.tls.client_key_file = Some(path.clone()),
        }
        let (key, error) = refused(destination);
        assert_eq!(key, format!("destinations.billing.tls.{setting}"), "{file}");
        assert!(error.contains(reason), "{error}");
        assert!(error.contains(path.to_str().expect("a path")), "{error}");
    }
}

#[test]
fn files_that_do_not_go_together_are_an_error_at_start() {
    let authority = Authority::new();
    let good = authority.known_as("relay", 1);
    let wrong_order = [authority.read("ca.pem"), authority.read("relay.pem")];
    let mut destination = good.clone();
    let wrong_order = authority.write("wrong-order.pem", &wrong_order.concat());
    destination.tls.client_cert_file = Some(wrong_order);
    let (_, error) = refused(destination);
    assert!(
        error.contains("certificate 2 of client_cert_file"),
        "{error}"
    );

    let mut destination = good.clone();
    destination.tls.client_key_file = None;
    let (key, error) = refused(destination);
    assert_eq!(key, "destinations.billing.tls");
    assert!(error.contains("go together"), "{error}");

    let mut config = Config::default();
    config.tls_roots = Roots::File(authority.write("empty.pem", b""));
    config.destinations = vec![super::destination(1)];
    let error = HttpDispatcher::new(&config).expect_err("no certificate in the file");
    assert_eq!(error.key(), "OUTBOX_TLS_ROOTS");
    config.destinations = vec![good];
    HttpDispatcher::new(&config).expect("the destination's own file is good");
}

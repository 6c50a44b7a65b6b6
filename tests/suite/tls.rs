//! TLS: which certificates are trusted, which certificate the relay presents, and which versions it speaks. `openssl`
//! makes the certificates; the receivers use rustls or openssl.

mod files;
mod ground;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use diesel_outbox::config::{Config, Proxy, Roots, TlsVersion};
use diesel_outbox::endpoints::Endpoint;
use diesel_outbox::feed::{After, ReadError, Reader};
use diesel_outbox::{Destination, HttpDispatcher, RelayHandle};
use serde_json::json;

use self::ground::{
    Authority, BOTH, Clients, ONLY_1_2, ONLY_1_3, OpensslServer, TlsReceiver, destination,
};

use crate::proxy::{ConnectProxy, tunnel};
use crate::support::{Database, end, eventually, finish};

fn relay(database: &Database, destination: Destination) -> RelayHandle {
    database
        .relay()
        .send_timeout(Duration::from_secs(5))
        .lease(Duration::from_secs(15))
        .max_attempts(1)
        .destination(destination)
        .route("*", "billing")
        .start()
        .expect("a relay")
}

#[track_caller]
fn is_delivered(destination: Destination) {
    let database = Database::new();
    let relay = relay(&database, destination);
    database.enqueue("order.paid", json!(1));
    eventually("the message is settled", || {
        database.count("delivered") + database.count("dead") == 1
    });
    let error = database.text("SELECT error FROM {o}_ledger");
    assert_eq!(database.count("delivered"), 1, "{error:?}");
    end(&relay);
}

/// Sends a message that must be dead-lettered. Returns its reason and its error.
fn dies(destination: Destination) -> (String, String) {
    let database = Database::new();
    let relay = relay(&database, destination);
    database.enqueue("order.paid", json!(1));
    eventually("the message is dead-lettered", || {
        database.count("dead") == 1
    });
    end(&relay);
    let of = |column: &str| {
        let value = database.text(&format!("SELECT {column} FROM {{o}}_dead"));
        value.expect("a dead letter")
    };
    (of("reason"), of("last_error"))
}

#[track_caller]
fn fails_for_good_by_tls(destination: Destination) -> String {
    let (reason, error) = dies(destination);
    assert_eq!(reason, "TLS", "{error}");
    error
}

// --- Whom the relay trusts ----------------------------------------------------------------

#[test]
fn a_certificate_is_refused_unless_who_signed_it_is_trusted() {
    let authority = Authority::new();
    let receiver = TlsReceiver::start(&authority, BOTH, Clients::Anybody);
    let error = fails_for_good_by_tls(destination(receiver.port));
    assert_eq!(
        error,
        format!(
            "TLS handshake with localhost:{}: invalid peer certificate: UnknownIssuer (no trusted root has signed it, or \
             the receiver does not send the whole chain: see OUTBOX_TLS_ROOTS)",
            receiver.port
        )
    );
    assert_eq!(receiver.delivered(), 0);
    is_delivered(authority.trusting(receiver.port));
    assert_eq!(receiver.delivered(), 1);

    let stranger = Authority::new();
    let error = fails_for_good_by_tls(stranger.trusting(receiver.port));
    assert!(error.contains("invalid peer certificate"), "{error}");
}

#[test]
fn a_reader_of_a_feed_trusts_certificates_as_a_destination_does() {
    let authority = Authority::new();
    let server = TlsReceiver::start(&authority, BOTH, Clients::Anybody);
    let url = format!("https://localhost:{}/events", server.port);
    let reader = Reader::new(&url, "t".into()).expect("a reader");
    let reader = reader.retry_for(Duration::ZERO);
    let error = reader.page(After::Begin).expect_err("not trusted");
    assert!(
        matches!(&error, ReadError::Unavailable { reason } if reason.contains("invalid peer certificate: UnknownIssuer")),
        "{error:?}"
    );
    assert_eq!(server.delivered(), 0);
    let roots = Roots::File(authority.path("ca.pem"));
    let reader = reader.roots(roots).expect("a file");
    // It trusts the server, which has no page.
    let error = reader.page(After::Begin).expect_err("no page");
    assert!(matches!(error, ReadError::NotAPage { .. }), "{error:?}");
    assert_eq!(server.delivered(), 1);
    // A proxy carries what it cannot read.
    let proxy = ConnectProxy::treating(tunnel);
    let reader = reader.proxy(proxy.url().into()).expect("a proxy");
    let error = reader.page(After::Begin).expect_err("no page");
    assert!(matches!(error, ReadError::NotAPage { .. }), "{error:?}");
    assert_eq!((server.delivered(), proxy.heads().len()), (2, 1));
}

/// R54: the cryptography that this program has knows no P-521, and the customer reads it.
#[test]
fn a_certificate_of_an_authority_with_p_521_is_refused_with_this_reason() {
    let authority = Authority::new();
    authority.openssl("req -x509 -days 2 -subj /CN=p521 -newkey ec -pkeyopt ec_paramgen_curve:secp521r1 -nodes -keyout ca.key -out ca.pem");
    authority.sign("server", "subjectAltName=DNS:localhost,IP:127.0.0.1");
    let server = OpensslServer::start(&authority, "-tls1_3");
    let database = Database::new();
    let url = format!("https://localhost:{}/", server.port);
    let hook = Endpoint::new("hook", url);
    let (outbox, conn) = (database.outbox(), &mut database.connect());
    outbox.endpoints().put(conn, &hook).expect("put");
    let mut config = Config::default();
    config.endpoint_public_only = false;
    config.tls_roots = Roots::File(authority.path("ca.pem"));
    let test = outbox.endpoints().test(conn, "hook", &config);
    let answer = test.expect("ready").expect("it is there").send();
    assert_eq!(
        answer.public_error().as_deref(),
        Some(
            "the certificate of localhost, or of an authority above it, is signed in a way that is not supported (for example with P-521)"
        ),
        "{answer:?}"
    );
}

#[test]
fn a_certificate_for_another_name_is_refused() {
    let authority = Authority::new();
    authority.sign("server", "subjectAltName=DNS:shop.example");
    let receiver = TlsReceiver::start(&authority, BOTH, Clients::Anybody);
    let error = fails_for_good_by_tls(authority.trusting(receiver.port));
    assert!(error.contains("not valid for name"), "{error}");
}

/// What `openssl req -x509` makes by default is the certificate of an authority. curl accepts it as its own root, too.
#[test]
fn a_certificate_that_signs_itself_is_trusted_if_it_is_a_root() {
    for (subject, names) in [
        ("/CN=localhost", ""),
        ("/O=shop/CN=shop", " -addext subjectAltName=DNS:localhost"),
    ] {
        let authority = Authority::new();
        authority.sign_itself("server", subject, names);
        let receiver = TlsReceiver::start(&authority, BOTH, Clients::Anybody);
        let trusting = |file: &str| {
            let mut destination = destination(receiver.port);
            destination.tls.roots = Some(Roots::File(authority.path(file)));
            destination
        };
        is_delivered(trusting("server.pem"));
        assert_eq!(receiver.delivered(), 1);
        // Another authority, and the same name and subject with another key.
        fails_for_good_by_tls(trusting("ca.pem"));
        authority.sign_itself("other", subject, names);
        fails_for_good_by_tls(trusting("other.pem"));
        assert_eq!(receiver.delivered(), 1);
    }
}

#[test]
fn a_root_that_signs_itself_is_trusted_for_its_own_name_and_time_only() {
    for (subject, names, days) in [
        ("/CN=shop.example", "", 2),
        ("/CN=localhost", "subjectAltName=DNS:shop.example", 2),
        ("/CN=localhost", "subjectAltName=DNS:localhost", 0),
    ] {
        let authority = Authority::new();
        authority.sign_itself_for("server", subject, names, days);
        if days == 0 {
            // Certificates count seconds.
            std::thread::sleep(Duration::from_millis(1100));
        }
        let receiver = TlsReceiver::start(&authority, BOTH, Clients::Anybody);
        let mut destination = destination(receiver.port);
        destination.tls.roots = Some(Roots::File(authority.path("server.pem")));
        let error = fails_for_good_by_tls(destination);
        let is_named = error.contains("not valid for") || error.contains("expired");
        assert!(is_named, "{error}");
        assert_eq!(receiver.delivered(), 0);
    }
}

#[test]
fn roots_of_a_file_are_the_only_ones_and_those_of_the_setting_are_everybodys() {
    let authority = Authority::new();
    let receiver = TlsReceiver::start(&authority, BOTH, Clients::Anybody);
    for (roots, delivered) in [
        (authority.path("ca.pem").into_os_string(), 1),
        ("bundled".into(), 1),
        ("system".into(), 2),
    ] {
        let database = Database::new();
        database.enqueue("order.paid", json!(1));
        let mut drain = database.binary(&["drain"]);
        drain
            .env(
                "OUTBOX_URL",
                format!("https://127.0.0.1:{}/", receiver.port),
            )
            .env("OUTBOX_TLS_ROOTS", &roots)
            .env("OUTBOX_MAX_ATTEMPTS", "1")
            // The system's trust store, as the relay sees it.
            .env("SSL_CERT_FILE", authority.path("ca.pem"))
            .env_remove("SSL_CERT_DIR");
        let finished = finish(drain);
        assert_eq!(receiver.delivered(), delivered, "{}", finished.stderr);
    }
}

// --- What the relay shows of itself -------------------------------------------------------

#[test]
fn a_receiver_that_wants_a_certificate_gets_the_one_of_the_settings() {
    let authority = Authority::new();
    for versions in [ONLY_1_2, ONLY_1_3] {
        let receiver = TlsReceiver::start(&authority, versions, Clients::Known);
        is_delivered(authority.known_as("relay", receiver.port));
        assert_eq!(receiver.delivered(), 1);

        // With TLS 1.3 the refusal comes after the handshake, and the end of the connection may overtake it.
        let (reason, error) = dies(authority.trusting(receiver.port));
        let may_be: &[&str] = match versions {
            ONLY_1_2 => &["TLS"],
            _ => &["TLS", "CONNECTION_LOST"],
        };
        assert!(may_be.contains(&reason.as_str()), "{reason}: {error}");

        let stranger = Authority::new();
        let mut unknown = stranger.known_as("relay", receiver.port);
        unknown.tls.roots = Some(Roots::File(authority.path("ca.pem")));
        let (reason, error) = dies(unknown);
        assert!(may_be.contains(&reason.as_str()), "{reason}: {error}");
        assert_eq!(receiver.delivered(), 1);
    }
}

/// R59.
#[test]
fn endpoints_see_the_certificate_of_their_setting() {
    let authority = Authority::new();
    let receiver = TlsReceiver::start(&authority, BOTH, Clients::Known);
    let known = authority.known_as("relay", receiver.port);
    let mut config = Config::default();
    let hook = Endpoint::new("hook", known.url.as_str());
    let test = |config: &Config| {
        let database = Database::new();
        let (outbox, conn) = (database.outbox(), &mut database.connect());
        let destinations = outbox.endpoints();
        destinations.put(conn, &hook).expect("put");
        let test = destinations.test(conn, "hook", config).expect("ready");
        test.expect("it is there").send().went_well
    };
    config.tls_roots = Roots::File(authority.path("ca.pem"));
    config.endpoint_public_only = false;
    assert!(!test(&config), "without a certificate");
    config.endpoint_client_cert_file = known.tls.client_cert_file;
    let error = HttpDispatcher::new(&config).expect_err("no key");
    assert_eq!(error.key(), "OUTBOX_ENDPOINT_CLIENT_CERT_FILE");
    config.endpoint_client_key_file = known.tls.client_key_file;
    HttpDispatcher::new(&config).expect("a certificate and its key");
    assert!(test(&config));
    assert_eq!(receiver.delivered(), 1);
}

#[test]
fn keys_are_read_in_every_form_that_is_not_encrypted() {
    let authority = Authority::new();
    let receiver = TlsReceiver::start(&authority, BOTH, Clients::Known);
    let mut destination = authority.known_as("relay", receiver.port);
    authority.openssl("ec -in relay.key -out sec1.key");
    assert!(authority.read("sec1.key").starts_with(b"-----BEGIN EC"));
    // The certificate, its issuer's certificate, and the key in one file.
    let all = [
        authority.read("relay.pem"),
        authority.read("ca.pem"),
        authority.read("relay.key"),
    ];
    let all = authority.write("all.pem", &all.concat());
    for key in [authority.path("sec1.key"), all.clone()] {
        destination.tls.client_key_file = Some(key);
        destination.tls.client_cert_file = Some(all.clone());
        is_delivered(destination.clone());
    }
}

// --- Versions -----------------------------------------------------------------------------

#[test]
fn with_1_3_as_the_oldest_version_a_receiver_with_1_2_is_refused() {
    let authority = Authority::new();
    let old = TlsReceiver::start(&authority, ONLY_1_2, Clients::Anybody);
    let new = TlsReceiver::start(&authority, ONLY_1_3, Clients::Anybody);
    is_delivered(authority.trusting(old.port));
    is_delivered(authority.trusting(new.port));
    let strict = |port| {
        let mut destination = authority.trusting(port);
        destination.tls.min_version = TlsVersion::V1_3;
        destination
    };
    is_delivered(strict(new.port));
    let error = fails_for_good_by_tls(strict(old.port));
    assert!(error.contains("ProtocolVersion"), "{error}");
    assert_eq!((old.delivered(), new.delivered()), (1, 2));

    let foreign = OpensslServer::start(&authority, "-tls1_2");
    let error = fails_for_good_by_tls(strict(foreign.port));
    assert!(error.contains("ProtocolVersion"), "{error}");
}

/// The versions that the relay offers, not only the agreed one: the extension `supported_versions` (RFC 8446, 4.2.1)
/// of the first message.
#[test]
fn only_the_versions_of_the_settings_are_offered() {
    for (min_version, extension) in [
        (TlsVersion::V1_2, &[0, 43, 0, 5, 4, 3, 4, 3, 3][..]),
        (TlsVersion::V1_3, &[0, 43, 0, 3, 2, 3, 4]),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let hello = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("the relay connects");
            let mut head = [0; 5];
            stream.read_exact(&mut head).expect("a record");
            let mut hello = vec![0; usize::from(u16::from_be_bytes([head[3], head[4]]))];
            stream.read_exact(&mut hello).expect("the first message");
            hello
        });
        let mut destination = destination(port);
        destination.tls.min_version = min_version;
        fails_for_good_by_tls(destination);
        let hello = hello.join().expect("no panic");
        let offers = |bytes: &[u8]| hello.windows(bytes.len()).any(|part| part == bytes);
        assert!(offers(extension), "{min_version:?}: {hello:?}");
    }
}

// --- What is shared -----------------------------------------------------------------------

#[test]
fn senders_of_a_destination_share_what_tls_remembers() {
    let authority = Authority::new();
    let receiver = TlsReceiver::start(&authority, ONLY_1_2, Clients::Anybody);
    let database = Database::new();
    let relay = database
        .relay()
        .send_timeout(Duration::from_secs(5))
        .lease(Duration::from_secs(15))
        .concurrency(8)
        .destination(authority.trusting(receiver.port))
        .route("*", "billing")
        .start()
        .expect("a relay");
    database.enqueue("order.paid", json!(1));
    eventually("one message is delivered", || {
        database.count("delivered") == 1
    });
    database.enqueue_many(200);
    eventually("all messages are delivered", || {
        database.count("delivered") == 201
    });
    assert!(
        receiver.resumed() > 0,
        "other senders resumed the first sender's session"
    );
    end(&relay);
}

// --- Responses ----------------------------------------------------------------------------

#[test]
fn an_answer_before_the_body_was_read_counts_with_tls() {
    let authority = Authority::new();
    let receiver = TlsReceiver::start(&authority, BOTH, Clients::Anybody);
    let database = Database::new();
    // Longer than the buffers of both ends of a connection.
    database.execute("DROP TRIGGER outbox_payload_is_at_most_1_mib ON {o}");
    database.execute(
        "INSERT INTO {o} (topic, payload)
         VALUES ('order.paid', to_json(repeat('x', 10000000)))",
    );
    let relay = database
        .relay()
        .destination(authority.trusting(receiver.port))
        .route("*", "billing")
        .start()
        .expect("a relay");
    eventually("the message is settled", || {
        database.number("SELECT count(*) FROM {o}_ledger") == 1
    });
    end(&relay);
    assert_eq!(
        database.text("SELECT reason || ' ' || attempts || ' ' || http_status FROM {o}_dead"),
        Some("REJECTED 1 413".to_owned())
    );
}

// --- With a proxy -------------------------------------------------------------------------

#[test]
fn tls_goes_through_the_tunnel_of_a_proxy_to_the_destination() {
    let authority = Authority::new();
    let receiver = TlsReceiver::start(&authority, BOTH, Clients::Known);
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let proxy = format!("http://{}", listener.local_addr().expect("an address"));
    let port = receiver.port;
    std::thread::spawn(move || {
        for client in listener.incoming().flatten() {
            std::thread::spawn(move || carry(client, port));
        }
    });
    let mut destination = authority.known_as("relay", port);
    destination.proxy = Some(Proxy::Via(proxy.parse().expect("a URL")));
    is_delivered(destination.clone());
    destination.tls.roots = Some(Roots::Bundled);
    let error = fails_for_good_by_tls(destination);
    assert!(error.contains("UnknownIssuer"), "{error}");
}

/// Opens a tunnel and forwards bytes both ways. When one direction ends, both end.
fn carry(mut client: TcpStream, port: u16) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        client.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let mut server = TcpStream::connect(("127.0.0.1", port))?;
    client.write_all(b"HTTP/1.1 200 OK\r\n\r\n")?;
    let (mut from_server, mut to_client) = (server.try_clone()?, client.try_clone()?);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from_server, &mut to_client);
        let _ = to_client.shutdown(std::net::Shutdown::Both);
    });
    std::io::copy(&mut client, &mut server)?;
    server.shutdown(std::net::Shutdown::Both)
}

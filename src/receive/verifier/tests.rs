use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
use proptest::sample::Index;

use super::*;
use crate::config::parse_secrets;

const FIRST: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const SECOND: &str = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
const NOW: u64 = 1_795_204_800;

fn at(seconds: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(seconds)
}

fn verifier(secrets: &str) -> Verifier {
    secrets.parse().expect("secrets")
}

/// The headers of a request that was signed with these secrets.
fn signed(secrets: &str, id: &str, timestamp: &str, body: &[u8]) -> Vec<(&'static str, String)> {
    let secrets = parse_secrets("secrets", secrets).expect("secrets");
    let signature = Signer::new(&secrets)
        .expect("a signer")
        .sign(id.as_bytes(), timestamp.as_bytes(), body)
        .expect("a header's value")
        .expect("there are secrets");
    vec![
        (ID, id.to_owned()),
        (TIMESTAMP, timestamp.to_owned()),
        (SIGNATURE, signature.to_str().expect("ASCII").to_owned()),
    ]
}

fn result(secrets: &str, headers: &[(&str, String)], body: &[u8]) -> Result<(), VerifyError> {
    let headers = Headers::new(headers.iter().map(|(name, value)| (*name, value.as_str())));
    let verified = verifier(secrets).verify_at(&headers, body, at(NOW));
    verified.map(|_| ())
}

/// R33. The test vector of the Standard Webhooks libraries.
#[test]
fn a_request_of_the_standards_own_libraries_is_verified() {
    let headers = Headers::new([
        ("Webhook-Id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
        ("Webhook-Timestamp", "1614265330"),
        (
            "Webhook-Signature",
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
    ]);
    let verified =
        verifier(FIRST).verify_at(&headers, br#"{"test": 2432232314}"#, at(1_614_265_331));
    let verified = verified.expect("verified");
    assert_eq!(verified.id, "msg_p5jXN8AQM9LWM0D4loKWxJek");
    assert_eq!(verified.timestamp, at(1_614_265_330));
}

/// R33.
#[test]
fn any_signature_by_any_secret_is_enough_and_other_versions_are_passed_over() {
    let headers = signed(FIRST, "a", &NOW.to_string(), b"{}");
    let both = format!("{SECOND} {FIRST}");
    assert_eq!(result(&both, &headers, b"{}"), Ok(()));
    assert_eq!(result(SECOND, &headers, b"{}"), Err(VerifyError::NoMatch));

    let mut headers = signed(&both, "a", &NOW.to_string(), b"{}");
    assert_eq!(result(FIRST, &headers, b"{}"), Ok(()));
    let ours = headers[2].1.clone();
    headers[2].1 = format!("v1a,AAAA  v2, v1 v1, , v1,!!!! v1,AAAA {ours}");
    assert_eq!(result(FIRST, &headers, b"{}"), Ok(()));
    for others in [
        ours.replace("v1,", "v1a,"),
        ours.replace("v1,", ""),
        ours.replace("v1,", "V1,"),
        // A part of the signature.
        ours[..27].to_owned(),
        "v1,".to_owned(),
    ] {
        headers[2].1 = others;
        assert_eq!(result(&both, &headers, b"{}"), Err(VerifyError::NoMatch));
    }
}

/// R33. With asymmetric signatures, a receiver must not be able to sign.
#[test]
fn a_private_key_is_refused_by_receivers() {
    let text = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=";
    let secret: SigningSecret = text.parse().expect("a private key");
    let errors = [
        text.parse::<Verifier>().expect_err("a text"),
        Verifier::new(&[secret]).expect_err("a secret"),
    ];
    for error in errors {
        let error = error.to_string();
        assert!(error.contains("give its public key"), "{error}");
        assert!(!error.contains("6Xb"), "{error}");
    }
}

mod asymmetric {
    use super::*;

    const PRIVATE: &str = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=";
    const PUBLIC: &str = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=";
    const OTHER: &str = "whpk_11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=";

    /// R33. The test vector of the specification and of Svix's server.
    #[test]
    fn a_request_of_others_is_verified_with_the_public_key() {
        let request = |signature: &'static str| {
            Headers::new([
                ("webhook-id", "msg_p5jXN8AQM9LWM0D4loKWxJek"),
                ("webhook-timestamp", "1614265330"),
                ("webhook-signature", signature),
            ])
        };
        let headers = request(
            "v1,AAAA v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg==",
        );
        let (body, now) = (br#"{"test": 2432232314}"#, at(1_614_265_331));
        let both = format!("{OTHER},{PUBLIC}");
        for verifier in [verifier(PUBLIC), verifier(&both)] {
            assert!(verifier.verify_at(&headers, body, now).is_ok());
            let changed = verifier.verify_at(&headers, b"{}", now);
            assert_eq!(changed, Err(VerifyError::NoMatch));
        }
        let refused = verifier(OTHER).verify_at(&headers, body, now);
        assert_eq!(refused, Err(VerifyError::NoMatch));
        // A signature of one kind is not valid as the other kind.
        let headers = request(
            "v1,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg==",
        );
        let refused = verifier(PUBLIC).verify_at(&headers, body, now);
        assert_eq!(refused, Err(VerifyError::NoMatch));
    }

    /// R33. While a sender changes from a secret to a key pair, receivers with either accept the request.
    #[test]
    fn a_request_with_signatures_of_both_kinds_is_verified_by_either() {
        let headers = signed(&format!("{FIRST} {PRIVATE}"), "a", &NOW.to_string(), b"{}");
        for known in [
            FIRST,
            PUBLIC,
            &format!("{SECOND} {PUBLIC}"),
            &format!("{FIRST} {OTHER}"),
        ] {
            assert_eq!(result(known, &headers, b"{}"), Ok(()), "{known}");
        }
        for unknown in [SECOND, OTHER, &format!("{SECOND} {OTHER}")] {
            let refused = result(unknown, &headers, b"{}");
            assert_eq!(refused, Err(VerifyError::NoMatch), "{unknown}");
        }
    }

    /// Not a point of the curve: a typing error, with which nothing could ever be verified.
    #[test]
    fn a_public_key_that_verifies_nothing_is_refused() {
        let other = PUBLIC.replace("whpk_1", "whpk_2");
        let error = format!("{PUBLIC} {other}").parse::<Verifier>();
        let error = error.expect_err("no key").to_string();
        assert!(
            error.contains(&format!("{other} is not an Ed25519 key")),
            "{error}"
        );
    }

    #[test]
    fn who_knows_the_public_key_alone_cannot_sign_with_it() {
        // HMAC with the bytes of the public key as the secret would deceive a receiver that accepts any algorithm.
        let as_secret = PUBLIC.replace("whpk_", "whsec_");
        let mut headers = signed(&as_secret, "a", &NOW.to_string(), b"{}");
        assert_eq!(result(PUBLIC, &headers, b"{}"), Err(VerifyError::NoMatch));
        headers[2].1 = headers[2].1.replace("v1,", "v1a,");
        assert_eq!(result(PUBLIC, &headers, b"{}"), Err(VerifyError::NoMatch));
    }

    #[test]
    fn no_more_than_sixteen_signatures_are_looked_at() {
        let mut headers = signed(PRIVATE, "a", &NOW.to_string(), b"{}");
        let ours = headers[2].1.clone();
        let others = format!("v1a,{} ", BASE64.encode([0; 64]));
        headers[2].1 = format!("{}{ours}", others.repeat(15));
        assert_eq!(result(PUBLIC, &headers, b"{}"), Ok(()));
        headers[2].1 = format!("{}{ours}", others.repeat(16));
        assert_eq!(result(PUBLIC, &headers, b"{}"), Err(VerifyError::NoMatch));
    }

    proptest! {
        /// R33.
        #[test]
        fn a_signed_request_is_verified_and_a_changed_one_refused(
            seed in any::<[u8; 32]>(),
            body in proptest::collection::vec(any::<u8>(), 0..200),
            place in any::<Index>(),
            bit in 0..8_u8,
        ) {
            let private: SigningSecret = format!("whsk_{}", BASE64.encode(seed)).parse()?;
            let public = private.public_key()?.expect("asymmetric").to_string();
            let request = signed(
                secrecy::ExposeSecret::expose_secret(&private.written()), "a", &NOW.to_string(), &body,
            );
            prop_assert_eq!(result(&public, &request, &body), Ok(()));
            let mut changed = [&body[..], b" "].concat();
            let at = place.index(changed.len());
            changed[at] ^= 1 << bit;
            prop_assert_eq!(result(&public, &request, &changed), Err(VerifyError::NoMatch));

            let mut signature = BASE64.decode(&request[2].1["v1a,".len()..])?;
            let at = place.index(signature.len());
            signature[at] ^= 1 << bit;
            let mut request = request;
            request[2].1 = format!("v1a,{}", BASE64.encode(signature));
            prop_assert_eq!(result(&public, &request, &body), Err(VerifyError::NoMatch));
        }
    }
}

#[test]
fn a_header_that_is_missing_or_there_twice_is_named() {
    let complete = signed(FIRST, "a", &NOW.to_string(), b"{}");
    for name in [ID, TIMESTAMP, SIGNATURE] {
        let mut headers = complete.clone();
        headers.retain(|(other, _)| *other != name);
        let missing = Err(VerifyError::MissingHeader { name });
        assert_eq!(result(FIRST, &headers, b"{}"), missing);
        headers.push((name, String::new()));
        assert_eq!(result(FIRST, &headers, b"{}"), missing);
        let mut headers = complete.clone();
        headers.push((name, "1".to_owned()));
        let error = result(FIRST, &headers, b"{}").expect_err("twice");
        assert!(error.to_string().contains(name), "{error}");
        assert!(error.to_string().contains("twice"), "{error}");
    }
}

/// R33.
#[test]
fn a_request_is_refused_when_it_is_older_or_newer_than_the_tolerance() {
    let request = |seconds: u64| signed(FIRST, "a", &seconds.to_string(), b"{}");
    for seconds in [NOW - 300, NOW, NOW + 300] {
        assert_eq!(result(FIRST, &request(seconds), b"{}"), Ok(()));
    }
    let old = VerifyError::TooOld { seconds: 301 };
    assert_eq!(result(FIRST, &request(NOW - 301), b"{}"), Err(old));
    let new = VerifyError::TooNew { seconds: 301 };
    assert_eq!(result(FIRST, &request(NOW + 301), b"{}"), Err(new));

    let (old, new) = (request(NOW - 11), request(u64::MAX));
    let (old, new) = (Headers::new(old), Headers::new(new));
    let strict = verifier(FIRST).tolerance(Duration::from_secs(10));
    let refused = strict.verify_at(&old, b"{}", at(NOW));
    assert_eq!(refused, Err(VerifyError::TooOld { seconds: 11 }));
    let lax = verifier(FIRST).tolerance(Duration::MAX);
    assert!(lax.verify_at(&old, b"{}", at(NOW)).is_ok());
    let refused = lax.verify_at(&new, b"{}", at(NOW));
    assert!(matches!(refused, Err(VerifyError::TooNew { .. })));
    assert!(lax.verify(&old, b"{}").is_ok());
}

#[test]
fn a_timestamp_is_a_number_of_seconds() {
    for timestamp in [
        "+1795204800",
        "-1",
        "1795204800.0",
        "1e9",
        "soon",
        "0x1",
        "99999999999999999999",
        "١",
    ] {
        let mut headers = signed(FIRST, "a", "1", b"{}");
        headers[1].1 = timestamp.to_owned();
        let refused = result(FIRST, &headers, b"{}");
        assert_eq!(refused, Err(VerifyError::Timestamp), "{timestamp}");
    }
}

/// The signed text is `id.timestamp.body`. If the body begins with a number, the text could be split differently.
#[test]
fn a_signed_request_cannot_be_split_differently() {
    let body = format!("{NOW}.5");
    let mut headers = signed(FIRST, "a", &(NOW - 1).to_string(), body.as_bytes());
    assert_eq!(result(FIRST, &headers, body.as_bytes()), Ok(()));
    headers[0].1 = format!("a.{}", NOW - 1);
    headers[1].1 = NOW.to_string();
    let error = result(FIRST, &headers, b"5").expect_err("another split");
    assert!(matches!(error, VerifyError::BadHeader { name: ID, .. }));
}

#[test]
fn without_a_secret_there_is_no_verifier_and_none_is_ever_shown() {
    assert!(Verifier::new(&[]).is_err());
    assert!("".parse::<Verifier>().is_err());
    let error = format!("{SECOND},hunter2").parse::<Verifier>();
    let error = error.expect_err("not a secret").to_string();
    assert!(
        !error.contains("hunter2") && !error.contains("C2FV"),
        "{error}"
    );
    let verifier = verifier(FIRST);
    assert_eq!(
        format!("{verifier:?}"),
        "Verifier { signer: Signer(1 secrets), public_keys: 0, tolerance: 300s, takes_binary: true, at: None }"
    );
    let headers = signed(FIRST, "a", &NOW.to_string(), b"{}");
    let error = result(SECOND, &headers, b"{}").expect_err("another secret");
    assert_eq!(format!("{error:?}"), "NoMatch");
}

/// R33. The content type is not signed, so a document could be passed off as the data of another event.
#[test]
fn who_refuses_binary_mode_takes_only_attributes_that_are_signed() {
    let document =
        br#"{"specversion":"1.0","id":"0198b2f1","source":"/shop","type":"order.paid","data":7}"#;
    let mut request = signed(FIRST, "0198b2f1", &NOW.to_string(), document);
    for (name, value) in [
        ("ce-specversion", "1.0"),
        ("ce-source", "/shop"),
        ("ce-type", "order.refunded"),
        ("ce-id", "0198b2f1"),
        ("content-type", "application/json"),
    ] {
        request.push((name, value.to_owned()));
    }
    let passed_off = Headers::new(request.clone());
    request.last_mut().expect("content-type").1 = "application/cloudevents+json".to_owned();
    let as_sent = Headers::new(request);
    let strict = verifier(FIRST).refuse_binary();
    let error = strict.events_at(&passed_off, document, at(NOW));
    let error = error.expect_err("binary mode");
    assert_eq!((&error, error.status()), (&ReceiveError::Binary, 401));
    let events = strict.events_at(&as_sent, document, at(NOW));
    assert_eq!(events.expect("one event")[0].event_type, "order.paid");
    let events = verifier(FIRST).events_at(&passed_off, document, at(NOW));
    assert_eq!(events.expect("one event")[0].event_type, "order.refunded");
}

/// R33. In binary mode `ce-id` is not signed, so it must equal `webhook-id`, which is signed.
#[test]
fn in_binary_mode_a_duplicate_cannot_be_passed_off_as_another_message() {
    let mut request = signed(FIRST, "0198b2f1", &NOW.to_string(), b"7");
    for (name, value) in [
        ("content-type", "application/json"),
        ("ce-specversion", "1.0"),
        ("ce-source", "/shop"),
        ("ce-type", "order.paid"),
        ("ce-id", "0198b2f1"),
    ] {
        request.push((name, value.to_owned()));
    }
    let verifier = verifier(FIRST);
    let headers = Headers::new(request.clone());
    let events = verifier.events_at(&headers, b"7", at(NOW));
    assert_eq!(events.expect("one event")[0].id, "0198b2f1");

    request.last_mut().expect("ce-id").1 = "0198b2f2".to_owned();
    let headers = Headers::new(request);
    let error = verifier
        .events_at(&headers, b"7", at(NOW))
        .expect_err("another id");
    assert_eq!((&error, error.status()), (&ReceiveError::OtherId, 401));
    assert!(super::super::events(&headers, b"7").is_ok());

    let error = verifier.events(&headers, b"8").expect_err("another body");
    assert!(matches!(error, ReceiveError::Verify(_)), "{error:?}");
    assert_eq!(error.status(), 401);
    let headers = Headers::new(signed(FIRST, "1", &NOW.to_string(), b"{}"));
    let error = verifier
        .events_at(&headers, b"{}", at(NOW))
        .expect_err("no event");
    assert_eq!(error.to_string(), "the attribute specversion is missing");
    assert_eq!(error.status(), 400);
}

proptest! {
    /// R33.
    #[test]
    fn a_signed_request_is_verified_and_a_changed_one_refused(
        id in "[!-\\-/-~]{1,40}",
        timestamp in NOW - 300..=NOW + 300,
        body in proptest::collection::vec(any::<u8>(), 0..200),
        place in any::<Index>(),
        bit in 0..8_u8,
    ) {
        let request = signed(FIRST, &id, &timestamp.to_string(), &body);
        prop_assert_eq!(result(FIRST, &request, &body), Ok(()));

        let flip = |bytes: &[u8]| {
            let mut bytes = bytes.to_vec();
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
            bytes
        };
        if !body.is_empty() {
            prop_assert_eq!(result(FIRST, &request, &flip(&body)), Err(VerifyError::NoMatch));
            prop_assert!(result(FIRST, &request, &body[1..]).is_err());
        }
        prop_assert!(result(FIRST, &request, &[&body[..], b" "].concat()).is_err());
        for part in 0..3 {
            let headers = request.iter().enumerate().map(|(index, (name, value))| {
                let value = value.as_bytes();
                (name, if index == part { flip(value) } else { value.to_vec() })
            });
            let headers = Headers::new(headers);
            let changed = headers.get(request[part].0).expect("once").unwrap_or_default();
            let verified = verifier(FIRST).verify_at(&headers, &body, at(NOW));
            // White space around a value is ignored.
            let is_changed = changed != request[part].1.as_bytes();
            prop_assert!(verified.is_err() == is_changed, "{verified:?}");
        }
    }

    #[test]
    fn any_headers_are_verified_or_refused(
        values in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40), 3),
        body in proptest::collection::vec(any::<u8>(), 0..40),
    ) {
        let headers = Headers::new([ID, TIMESTAMP, SIGNATURE].into_iter().zip(values));
        prop_assert!(verifier(FIRST).verify(&headers, &body).is_err());
    }
}

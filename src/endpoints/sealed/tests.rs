use super::*;

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const OTHER: &str = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=";

fn secret() -> SigningSecret {
    SECRET.parse().expect("a secret")
}

fn written(opened: &[Opened]) -> Vec<String> {
    let written = |one: &Opened| one.secret.written().expose_secret().to_owned();
    opened.iter().map(written).collect()
}

#[test]
fn without_a_key_secrets_are_stored_and_read_as_they_are() {
    let outbox = OutboxName::default();
    let place = SecretRow {
        outbox: &outbox,
        destination: "acme",
    };
    let none = SecretKeys::default();
    let stored = seal(&none, place, &secret().written()).expect("no key is needed");
    assert_eq!(stored.expose_secret(), SECRET);
    let column = format!("{SECRET}, {OTHER}");
    for keys in [none, SecretKeys::random()] {
        let opened = open_all(&keys, place, &column).expect("two");
        assert_eq!(written(&opened), [SECRET, OTHER]);
        assert!(opened.iter().all(|one| one.stored == StoredSecret::Plain));
        assert!(open_all(&keys, place, "").expect("none").is_empty());
        let error = open_all(&keys, place, &format!("{SECRET} hunter2"));
        let error = error.err().expect("not a secret");
        assert!(matches!(error, Unreadable::Bad(_)), "{error:?}");
        let error = error.to_string();
        assert!(error.starts_with("secret 2: "), "{error}");
        assert!(!error.contains("hunter2"), "{error}");
    }
}

/// While relays are upgraded, an older relay must not disable what a newer one can send to.
#[test]
fn a_value_sealed_by_a_later_version_is_locked_and_not_bad() {
    let outbox = OutboxName::default();
    let place = SecretRow {
        outbox: &outbox,
        destination: "acme",
    };
    for keys in [SecretKeys::default(), SecretKeys::random()] {
        for later in ["sealed2_AAECAwQFBgcICQoL", "sealed12.key.AAEC"] {
            let error = open_all(&keys, place, later).err();
            assert_eq!(
                error,
                Some(Unreadable::Locked(
                    "secret 1: encrypted by a later version".to_owned()
                ))
            );
        }
    }
}

mod sealed {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};
    use proptest::sample::Index;

    use super::*;

    const OLD: &str = "9MMfxlcYUyu2sa5cYoUYXvyhYOXs7TtNvOLzlpTtrLo=";
    const NEW: &str = "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFBQUE=";

    fn keys(text: &str) -> SecretKeys {
        text.parse().expect("keys")
    }

    fn sealed(keys: &SecretKeys, place: SecretRow<'_>) -> String {
        let sealed = seal(keys, place, &secret().written()).expect("sealed");
        sealed.expose_secret().to_owned()
    }

    fn at<'a>(outbox: &'a OutboxName, destination: &'a str) -> SecretRow<'a> {
        SecretRow {
            outbox,
            destination,
        }
    }

    #[test]
    fn a_sealed_secret_shows_nothing_and_is_opened_with_its_key() {
        let outbox = OutboxName::default();
        let (place, new) = (at(&outbox, "acme"), keys(NEW));
        let [one, other] = [0, 1].map(|_| sealed(&new, place));
        assert!(
            one.starts_with("sealed1_") && !one.contains("MfKQ"),
            "{one}"
        );
        assert_ne!(one, other, "each has a nonce of its own");
        let opened = open_all(&new, place, &format!("{one} {other} {OTHER}"));
        let opened = opened.expect("three");
        assert_eq!(written(&opened), [SECRET, SECRET, OTHER]);
        let stored: Vec<StoredSecret> = opened.iter().map(|one| one.stored).collect();
        assert_eq!(
            stored,
            [
                StoredSecret::ByNewestKey,
                StoredSecret::ByNewestKey,
                StoredSecret::Plain
            ]
        );
    }

    /// Python's `cryptography` (`AESGCM`) sealed this secret, with the nonce 0, 1, … 11.
    #[test]
    fn the_form_is_aes_256_gcm_as_others_have_it() {
        let outbox = OutboxName::default();
        let by_python = "sealed1_AAECAwQFBgcICQoLB8VaCULU2lqmDNSxL7JRo+IstdGuh7qI6tlJ8xmRIVTR6Ve2UUIae3OsTPISIwWYkSS1bpew";
        let opened = open_all(&keys(OLD), at(&outbox, "acme"), by_python).expect("opened");
        assert_eq!(written(&opened), [SECRET]);
    }

    /// Sealed through rustls with ring, as versions before the crate `aes-gcm` did.
    #[test]
    fn a_secret_sealed_by_an_earlier_version_is_opened() {
        let plain = [
            SECRET,
            "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==",
        ];
        for (outbox, destination, column) in [
            (
                "outbox",
                "acme",
                "sealed1_pFdlqPZ+RXksmP/SkL+pzqGsS2vAJfEcdjjwC7XSo9swxlvd/XzqBWxLCe4hLvZHVVDL3nluYJV0lOWFQUPY/eZT sealed1_ZqwFFG1QImdwTeSRx6zYlc+keDjo1GpusQYMwAKyNvOlEIeb2ma2UmUS/hzxZaVhMr322ZFm0lpLfYiXvDRWDMi0fL5+LDeMunjZ0h3zIb6vdVmVd3Tic57ba9JTnDjFip4ed3Qy/SU9VWt3frbTqkZsaetI9dDkxg==",
            ),
            (
                "shop.outbox_2",
                "läden",
                "sealed1_ECYDEEokNqepRjrF3a3Wf1uuTEZLj8B9/4rCk5LskD13lC74I80skpRcLrrILRuH3FVpuWp7VBHgmXN5nN3UTCRX sealed1_lUAJEfJSnobQk0aC/ge+UOWBEkrBS9CQmq5osJ7k5MU3W/0pWi/eYH7Eh8UZo5fWNDQAofRnArpVhW3zfNPtTprN99N/522wcm6WkJ4Ot9Zim9JDzyTz6jmsGRZqKpUKg03AcoxX0XZUlABQmKKqKMuffiKIhlA1hA==",
            ),
        ] {
            let outbox: OutboxName = outbox.parse().expect("a name");
            let opened = open_all(&keys(OLD), at(&outbox, destination), column);
            assert_eq!(written(&opened.expect("both")), plain);
        }
    }

    #[test]
    fn an_older_key_opens_and_the_newest_seals() {
        let outbox = OutboxName::default();
        let (place, old) = (at(&outbox, "acme"), keys(OLD));
        let both = keys(&format!("{NEW} {OLD}"));
        let opened = open_all(&both, place, &sealed(&old, place)).expect("opened");
        assert_eq!(opened[0].stored, StoredSecret::ByOlderKey);
        let newest = sealed(&both, place);
        let opened = open_all(&keys(NEW), place, &newest).expect("opened");
        assert_eq!(opened[0].stored, StoredSecret::ByNewestKey);
        let error = open_all(&old, place, &newest).err().expect("another key");
        assert!(matches!(error, Unreadable::Locked(_)), "{error:?}");
        let error = error.to_string();
        assert!(
            error.contains("no key of OUTBOX_SECRET_KEY decrypts it"),
            "{error}"
        );
        let error = open_all(&SecretKeys::default(), place, &newest);
        let error = error.err().expect("no key").to_string();
        assert!(error.contains("no key is given"), "{error}");
    }

    #[test]
    fn a_secret_opens_in_its_own_row_only() {
        let [outbox, other] = ["outbox", "other"].map(|name| name.parse().expect("a name"));
        let new = keys(NEW);
        let text = sealed(&new, at(&outbox, "acme"));
        for place in [at(&outbox, "evil"), at(&other, "acme"), at(&outbox, "")] {
            assert!(open_all(&new, place, &text).is_err());
        }
        // The same outbox, by its full name and by the search path.
        let whole: OutboxName = "shop.outbox".parse().expect("a name");
        assert!(open_all(&new, at(&whole, "acme"), &text).is_ok());
    }

    proptest! {
        #[test]
        fn nothing_changed_or_cut_off_is_opened(place in any::<Index>(), bit in 0..8_u8, cut in any::<Index>()) {
            let outbox = OutboxName::default();
            let (at, new) = (at(&outbox, "acme"), keys(NEW));
            let text = sealed(&new, at);
            let mut bytes = BASE64.decode(&text[PREFIX.len()..])?;
            let short = &bytes[..cut.index(bytes.len())];
            let short = format!("{PREFIX}{}", BASE64.encode(short));
            prop_assert!(open_all(&new, at, &short).is_err());
            let place = place.index(bytes.len());
            bytes[place] ^= 1 << bit;
            let changed = format!("{PREFIX}{}", BASE64.encode(bytes));
            let error = open_all(&new, at, &changed).err();
            prop_assert!(error.is_some_and(|error| !error.to_string().contains("whsec_")));
            prop_assert_eq!(written(&open_all(&new, at, &text).expect("as it was")), [SECRET]);
        }
    }
}

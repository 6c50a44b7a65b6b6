//! Secrets on the command line: created, shown to receivers, and never exposed to others.

use std::io::Write;
use std::process::Stdio;

use diesel_outbox::config::{Mode, PublicKey, SigningSecret};
use diesel_outbox::receive::{Headers, Verifier, VerifyError};
use diesel_outbox::{Destination, NewMessage};
use serde_json::json;

use crate::commands::With;
use crate::support::{Database, File, Finished, Receiver, binary, end, eventually, finish};

const SYMMETRIC: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
const PRIVATE: &str =
    "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg==";
const PUBLIC: &str = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=";

fn secret(arguments: &[&str]) -> Finished {
    finish(binary(&[&["secret"], arguments].concat()))
}

fn with_stdin(arguments: &[&str], text: &str) -> Finished {
    let mut child = binary(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("piped");
    stdin
        .write_all(text.as_bytes())
        .expect("the command reads its input");
    drop(stdin);
    let output = child.wait_with_output().expect("the command ends");
    Finished {
        status: output.status,
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
fn a_new_secret_is_of_the_kind_that_was_asked_for() {
    for (arguments, prefix) in [
        (&["new"][..], "whsec_"),
        (&["new", "--symmetric"], "whsec_"),
        (&["new", "--asymmetric"], "whsk_"),
    ] {
        let [one, other] = [0, 1].map(|_| secret(arguments).code(0).stdout);
        assert!(one.starts_with(prefix) && one != other, "{one}{other}");
        let read: SigningSecret = one.trim_end().parse().expect("a secret");
        let public = read.public_key().expect("a key");
        assert_eq!(public.is_some(), prefix == "whsk_");
    }
    secret(&["new", "--symmetric", "--asymmetric"]).code(2);
}

#[test]
fn the_public_key_is_shown_of_secrets_in_a_file_in_the_environment_and_on_standard_input() {
    let file = File::new(&format!("{PRIVATE}\n{SYMMETRIC}\n"));
    let expected = format!("{PUBLIC}\n");
    let of_file = secret(&["public", file.path()]).code(0);
    assert_eq!(of_file.stdout, expected);
    let of_stdin = with_stdin(&["secret", "public", "-"], &format!("{PRIVATE}\n"));
    assert_eq!(of_stdin.code(0).stdout, expected);
    for (variable, value) in [
        ("OUTBOX_SECRET", PRIVATE),
        ("OUTBOX_SECRET_FILE", file.path()),
    ] {
        let of_environment = finish(binary(&["secret", "public"]).with(variable, value));
        assert_eq!(of_environment.code(0).stdout, expected, "{variable}");
    }
    // `public` reads the output of `new`.
    let new = secret(&["new", "--asymmetric"]).code(0).stdout;
    let key = with_stdin(&["secret", "public", "-"], &new).code(0).stdout;
    assert!(key.trim_end().parse::<PublicKey>().is_ok(), "{key}");
}

#[test]
fn a_secret_without_a_public_key_is_reported_and_never_shown() {
    let broken = PRIVATE.replace("Kvg==", "Kvw==");
    let [symmetric, broken] = [SYMMETRIC, &broken].map(File::new);
    for (arguments, code, why) in [
        (&["public"][..], 1, "OUTBOX_SECRET is not set"),
        (&["public", symmetric.path()], 1, "only symmetric secrets"),
        (&["public", broken.path()], 2, "secret 1: the public half"),
        // The secret itself instead of a file.
        (&["public", PRIVATE], 1, "cannot read the given file"),
        (&["public", "/dev/null"], 2, "must not be empty"),
    ] {
        let error = secret(arguments).code(code).stderr;
        assert!(error.contains(why), "{error}");
        assert!(!error.contains("6Xb") && !error.contains("MfKQ"), "{error}");
    }
}

/// R33, R47. The relay signs with both secrets. A receiver that has only the public key can verify, but not sign.
#[test]
fn a_destination_may_have_secrets_of_both_kinds() {
    let (database, receiver) = (Database::new(), Receiver::ok());
    let mut destination = Destination::new("hook", &receiver.url()).expect("a URL");
    destination.policy.mode = Some(Mode::Structured);
    destination.secrets = [SYMMETRIC, PRIVATE]
        .map(|one| one.parse().expect("a secret"))
        .to_vec();
    let message = NewMessage::new("order.paid", &json!({ "n": 1 })).expect("JSON");
    database.enqueue_message(message);
    let relay = database.relay().destination(destination).route("*", "hook");
    let relay = relay.start().expect("a relay");
    eventually("the message is delivered", || {
        database.count("delivered") == 1
    });
    end(&relay);

    let request = receiver.requests().remove(0);
    let value = request.header("webhook-signature").expect("signed");
    let versions: Vec<&str> = value
        .split(' ')
        .filter_map(|one| one.split(',').next())
        .collect();
    assert_eq!(versions, ["v1", "v1a"]);
    let names = ["webhook-id", "webhook-timestamp", "webhook-signature"];
    let headers = names.map(|name| (name, request.header(name).expect("there")));
    let verify = |known: &str, body: &[u8]| {
        let verifier: Verifier = known.parse().expect("a key");
        verifier.verify(&Headers::new(headers), body).map(drop)
    };
    for known in [SYMMETRIC, PUBLIC] {
        assert_eq!(verify(known, &request.body), Ok(()));
        assert_eq!(verify(known, b"{}"), Err(VerifyError::NoMatch));
    }
}

/// R47
#[test]
fn of_an_endpoint_with_an_asymmetric_secret_only_the_public_key_is_shown() {
    let database = Database::new();
    let run = |arguments: &[&str]| finish(database.binary(&[&["endpoint"], arguments].concat()));
    run(&["put", "acme", "https://acme.example/hooks"]).code(0);
    let shown = run(&["rotate", "acme", "--asymmetric"]).code(0).stdout;
    assert!(shown.trim_end().parse::<PublicKey>().is_ok(), "{shown}");
    assert_eq!(run(&["show", "acme", "--reveal"]).code(0).stdout, shown);
    let stored = database.text("SELECT secret FROM {o}_endpoint");
    let stored = stored.expect("secrets");
    let prefixes: Vec<&str> = stored
        .split(' ')
        .filter_map(|one| one.split('_').next())
        .collect();
    assert_eq!(
        prefixes,
        ["whsk", "whsec"],
        "the previous secret still signs for a while"
    );
}

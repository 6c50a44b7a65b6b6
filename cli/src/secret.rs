//! `diesel-outbox secret`

use std::fs::File;
use std::io::{IsTerminal, Read, stdin};

use anyhow::{Context, Result, bail};
use diesel_outbox::ConfigError;
use diesel_outbox::config::{SecretKeys, SigningSecret};
use diesel_outbox::program::parse_secrets;
use secrecy::{ExposeSecret, SecretString};

use crate::output;
use crate::settings::SettingFlags;

/// The actions of `secret`.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Action {
    /// Create a signing secret for OUTBOX_SECRET or a destination, or a key for OUTBOX_SECRET_KEY
    New(New),
    /// Show the public keys of asymmetric secrets, for receivers to verify with
    Public {
        /// File with the secrets, or - for standard input [default: the secrets of OUTBOX_SECRET]
        file: Option<String>,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct New {
    /// Create a symmetric secret to share with receivers: whsec_… (HMAC-SHA256; the default)
    #[arg(long)]
    symmetric: bool,
    /// Create an asymmetric secret: whsk_… (Ed25519). Receivers get only the public key, which cannot sign
    #[arg(long, conflicts_with = "symmetric")]
    asymmetric: bool,
    /// Create a key for OUTBOX_SECRET_KEY instead, which encrypts secrets in the database
    #[arg(long, conflicts_with_all = ["symmetric", "asymmetric"])]
    at_rest: bool,
}

/// The most bytes read from a file. Secrets are short.
const MOST_BYTES: u64 = 64 * 1024;

pub(crate) fn run(action: &Action, settings: &SettingFlags) -> Result<()> {
    match action {
        Action::New(new) => {
            if new.at_rest {
                return output::line(SecretKeys::random().written().expose_secret());
            }
            let secret = match new.asymmetric {
                true => SigningSecret::random_asymmetric(),
                false => SigningSecret::random(),
            };
            output::line(secret.written().expose_secret())
        }
        Action::Public { file } => {
            let (from, secrets) = match file {
                Some(file) => (
                    file.as_str(),
                    parse_secrets("FILE", read(file)?.expose_secret())?,
                ),
                None => ("OUTBOX_SECRET", settings.load()?.secrets),
            };
            public(from, &secrets)
        }
    }
}

/// Prints a line for each asymmetric secret.
fn public(from: &str, secrets: &[SigningSecret]) -> Result<()> {
    let mut keys = Vec::new();
    for (index, secret) in secrets.iter().enumerate() {
        let wrong = |error: ConfigError| {
            ConfigError::new(from, format!("secret {}: {}", index + 1, error.reason()))
        };
        keys.extend(secret.public_key().map_err(wrong)?);
    }
    if keys.is_empty() {
        let found = match secrets.len() {
            0 => "is not set",
            _ => "has only symmetric secrets (whsec_…), which have no public keys",
        };
        bail!(
            "{from} {found}: create an asymmetric secret with `diesel-outbox secret new --asymmetric`"
        );
    }
    keys.iter().try_for_each(output::line)
}

fn read(file: &str) -> Result<SecretString> {
    let mut text = String::new();
    if file == "-" {
        if stdin().is_terminal() {
            eprintln!("diesel-outbox: paste the secrets, then press Ctrl-D");
        }
        let read = stdin().take(MOST_BYTES).read_to_string(&mut text);
        read.context("cannot read standard input")?;
        return Ok(text.into());
    }
    // Errors omit the argument, which may be a secret instead of a path.
    let opened = File::open(file).context("cannot read the given file")?;
    let read = opened.take(MOST_BYTES).read_to_string(&mut text);
    read.context("cannot read the given file")?;
    Ok(text.into())
}

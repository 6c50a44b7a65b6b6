//! `diesel-outbox secret`

use std::fs::File;
use std::io::{IsTerminal, Read, stdin};

use anyhow::{Context, Result, bail};
use diesel_outbox::ConfigError;
use diesel_outbox::config::{SecretKeys, SigningSecret, parse_secrets};
use secrecy::{ExposeSecret, SecretString};

use crate::output;
use crate::settings::SettingFlags;

/// Options of `secret`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Make a new secret, for OUTBOX_SECRET or a destination's `secret`, or a key for OUTBOX_SECRET_KEY
    New(New),
    /// Show the public keys of asymmetric secrets: what receivers verify with
    Public {
        /// The file with the secrets, or - for standard input; without it those of OUTBOX_SECRET
        file: Option<String>,
    },
}

#[derive(Debug, clap::Args)]
struct New {
    /// One that receivers get, too: whsec_… (HMAC-SHA256). The default
    #[arg(long)]
    symmetric: bool,
    /// One that no receiver gets: whsk_… (Ed25519). Receivers get its public key, which cannot sign
    #[arg(long, conflicts_with = "symmetric")]
    asymmetric: bool,
    /// No signing secret, but a key for OUTBOX_SECRET_KEY, which encrypts secrets in the database
    #[arg(long, conflicts_with_all = ["symmetric", "asymmetric"])]
    at_rest: bool,
}

/// Secrets are short. A longer text is no secret.
const MOST_BYTES: u64 = 64 * 1024;

pub(crate) fn run(options: &Options, settings: &SettingFlags) -> Result<()> {
    match &options.action {
        Action::New(new) => {
            if new.at_rest {
                return output::line(SecretKeys::random().written().expose_secret());
            }
            let secret = match new.asymmetric {
                true => SigningSecret::random_asymmetric()?,
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

/// A line for each asymmetric secret.
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
            _ => "has symmetric secrets only (whsec_…), which have no public keys",
        };
        bail!(
            "{from} {found}: make an asymmetric secret with `diesel-outbox secret new --asymmetric`"
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
    // What is refused may be a secret that was given instead of its file.
    let opened = File::open(file).context("cannot read the file that was given")?;
    let read = opened.take(MOST_BYTES).read_to_string(&mut text);
    read.context("cannot read the file that was given")?;
    Ok(text.into())
}

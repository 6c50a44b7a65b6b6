//! Registered destinations: webhooks that an application's own customers register.
//!
//! *Configured* destinations stand in `outbox.toml` or the builder. *Registered* ones are rows of
//! `outbox_destination`, which come, change and go while everything runs.
//! [`Outbox::destinations`] writes them in the application's transaction. The guide has a chapter on them,
//! [webhooks](https://github.com/diesel-outbox/diesel-outbox/blob/main/docs/webhooks.md).
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::destinations::{DeliveryFilter, DestinationFilter, RegisteredDestination};
//! use diesel_outbox::{Outbox, Status};
//! use std::time::Duration;
//!
//! # let tenant = uuid::Uuid::nil();
//! let outbox = Outbox::new("outbox")?;
//! let mut conn = PgConnection::establish("postgres://localhost/shop")?;
//! let destinations = outbox.destinations();
//!
//! let hook = RegisteredDestination::new("acme", "https://acme.example/hooks")
//!     .topics(["order.*"])
//!     .tenant(tenant);
//! destinations.put(&mut conn, &hook)?;
//! // What the customer verifies requests with.
//! let secret = destinations.secret(&mut conn, "acme")?;
//!
//! // A new secret; the old one signs beside it for a day.
//! let secret = destinations.rotate(&mut conn, "acme", Duration::from_secs(24 * 3600))?;
//!
//! // What a customer's own page shows.
//! let of_tenant = DestinationFilter { tenant_id: Some(tenant), ..DestinationFilter::default() };
//! for hook in destinations.list(&mut conn, &of_tenant, 100)? {
//!     println!("{} {} {}", hook.name, hook.url, hook.enabled);
//! }
//! destinations.disable(&mut conn, "acme", "the customer asked for it")?;
//! destinations.enable(&mut conn, "acme")?;
//! let hook = destinations.get(&mut conn, "acme")?;
//!
//! // What it gets, and what it did not get. That is sent again.
//! let page = destinations.deliveries(&mut conn, "acme", &DeliveryFilter::default(), 20)?;
//! for delivery in page.rows.iter().filter(|delivery| delivery.state == Status::Dead) {
//!     println!("{} {:?}", delivery.topic, delivery.public_error());
//!     destinations.send_again(&mut conn, "acme", delivery.message_id)?;
//! }
//! destinations.remove(&mut conn, "acme")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A limit for each tenant
//!
//! A tenant has 1,000 registered destinations at most; those without a tenant have no limit. The table itself counts, so
//! plain SQL is refused as well. The owner of the outbox sets another limit: `SELECT outbox_destination_limit('outbox',
//! 5000)`. One that is lower than what a tenant has removes nothing. Beyond it the tenant gets no more
//! ([`DestinationError::TooMany`]).

#[cfg(feature = "http")]
mod trial;

use std::time::Duration;

use diesel::PgConnection;
use secrecy::{ExposeSecret, SecretString};
use uuid::Uuid;

#[cfg(feature = "http")]
use crate::config::Config;
use crate::config::{ConfigError, SecretKeys, SigningSecret};
use crate::name::OutboxName;
use crate::outbox::Outbox;
use crate::sealed::{Opened, Place, Stored, open_all, seal};
use crate::store::destinations as store;
use crate::store::operate::deliveries::{self, SentAgain};
use crate::store::pinned::pinned;

#[cfg(feature = "http")]
pub use self::trial::{DestinationTest, TestAnswer};
pub use crate::registered::RegisteredDestination;
pub use crate::store::destinations::DestinationFilter;
pub use crate::store::operate::deliveries::{Deliveries, Delivery, DeliveryFilter};
pub use crate::store::operate::ledger::DeliveryCount;

/// Who has sent a message again, in its history.
const SENT_AGAIN_BY: &str = "send again";

/// Why a registered destination was not written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DestinationError {
    /// A value cannot be used. Nothing was sent to the database.
    #[error(transparent)]
    Invalid(#[from] ConfigError),
    /// The tenant has as many as it may have: see [the limit](self#a-limit-for-each-tenant). The caller's transaction is
    /// aborted.
    #[error(transparent)]
    TooMany(diesel::result::Error),
    /// The database refused or failed. The caller's transaction is aborted.
    #[error(transparent)]
    Database(diesel::result::Error),
    /// The message was delivered, and the ledger has not kept its payload, so it cannot be sent again.
    #[error(
        "message {message_id} was delivered, and the ledger has not kept its payload: with OUTBOX_LEDGER_PAYLOAD=true \
         messages that are delivered from then on can be sent again"
    )]
    PayloadNotKept {
        /// Its id.
        message_id: Uuid,
    },
}

impl From<diesel::result::Error> for DestinationError {
    fn from(error: diesel::result::Error) -> Self {
        match store::is_over_the_limit(&error) {
            true => Self::TooMany(error),
            false => Self::Database(error),
        }
    }
}

/// The registered destinations of an outbox: see [the module](self).
///
/// Every method works in the caller's transaction, where one is open: a relay sees the change when it is committed.
#[derive(Debug, Clone, Copy)]
pub struct Destinations<'a> {
    name: &'a OutboxName,
    keys: Option<&'a SecretKeys>,
}

/// How the secrets of registered destinations are stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Encryption {
    /// Destinations whose secrets are all encrypted with the newest key.
    pub newest: usize,
    /// Those with a secret that is encrypted with an older key, and none that is plain.
    pub older: usize,
    /// Those with a secret that is not encrypted.
    pub plain: usize,
    /// The names of those with a secret that cannot be read. No relay sends to them.
    pub unreadable: Vec<String>,
}

/// Destinations whose secrets are looked at in one statement.
const PAGE: i64 = 500;

impl Outbox {
    /// Its registered destinations.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let acme = outbox.destinations().get(&mut conn, "acme")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn destinations(&self) -> Destinations<'_> {
        Destinations {
            name: self.name(),
            keys: None,
        }
    }
}

impl<'a> Destinations<'a> {
    /// Encrypts secrets in the database with these keys: [`Config::secret_keys`](crate::Config::secret_keys), which
    /// the relay has to have, too. Without keys new secrets are stored as they are, and encrypted ones cannot be read.
    ///
    /// With keys, [`get`](Self::get) and [`list`](Self::list) also read the secrets: a destination whose secret cannot
    /// be decrypted has a [`problem`](RegisteredDestination::problem).
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let destinations = outbox.destinations().with_keys(&config.secret_keys);
    /// let secret = destinations.secret(&mut conn, "acme")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_keys(self, keys: &'a SecretKeys) -> Self {
        Self {
            keys: Some(keys).filter(|keys| !keys.is_empty()),
            ..self
        }
    }

    /// Registers a destination, or replaces all but the secrets of the one that has its name. A new one gets a secret.
    ///
    /// # Errors
    /// [`DestinationError::Invalid`] names the value that cannot be used.
    pub fn put(
        &self,
        conn: &mut PgConnection,
        destination: &RegisteredDestination,
    ) -> Result<(), DestinationError> {
        destination.check()?;
        let secret = self.sealed(&destination.name, &SigningSecret::random())?;
        store::put(conn, self.name, destination, secret.expose_secret())?;
        Ok(())
    }

    /// The destination of this name.
    ///
    /// # Errors
    /// When the database fails.
    pub fn get(
        &self,
        conn: &mut PgConnection,
        name: &str,
    ) -> Result<Option<RegisteredDestination>, DestinationError> {
        let mut found: Vec<_> = store::get(conn, self.name, name)?.into_iter().collect();
        self.tell_of_secrets(conn, &mut found)?;
        Ok(found.pop())
    }

    /// Destinations in the order of their names, `limit` of them at most.
    ///
    /// # Errors
    /// When the database fails.
    pub fn list(
        &self,
        conn: &mut PgConnection,
        filter: &DestinationFilter,
        limit: usize,
    ) -> Result<Vec<RegisteredDestination>, DestinationError> {
        let mut found = store::list(conn, self.name, filter, limit)?;
        self.tell_of_secrets(conn, &mut found)?;
        Ok(found)
    }

    /// Has messages sent there again. `false`: there is none of this name.
    ///
    /// # Errors
    /// When the database fails.
    pub fn enable(&self, conn: &mut PgConnection, name: &str) -> Result<bool, DestinationError> {
        Ok(store::set_enabled(conn, self.name, name, None)?)
    }

    /// Lets its messages wait. `false`: there is none of this name.
    ///
    /// # Errors
    /// When the database fails.
    pub fn disable(
        &self,
        conn: &mut PgConnection,
        name: &str,
        reason: &str,
    ) -> Result<bool, DestinationError> {
        Ok(store::set_enabled(conn, self.name, name, Some(reason))?)
    }

    /// Removes it: what waits for it becomes dead letters. `false`: there is none of this name.
    ///
    /// # Errors
    /// When the database fails.
    pub fn remove(&self, conn: &mut PgConnection, name: &str) -> Result<bool, DestinationError> {
        Ok(store::remove(conn, self.name, name)?)
    }

    /// The newest of its secrets. `None`: there is none of this name, or it has no secret.
    ///
    /// # Errors
    /// When the database fails, or a secret cannot be read: somebody has written what is none, or it is encrypted with
    /// a key that was not [given](Self::with_keys).
    pub fn secret(
        &self,
        conn: &mut PgConnection,
        name: &str,
    ) -> Result<Option<SigningSecret>, DestinationError> {
        let Some(text) = store::secret(conn, self.name, name)? else {
            return Ok(None);
        };
        let mut secrets = self.opened(name, &text)?.into_iter();
        Ok(secrets.next().map(|newest| newest.secret))
    }

    /// Makes a new symmetric secret. The one before it signs beside it for `keep`. `None`: there is none of this name.
    ///
    /// # Errors
    /// When the database fails.
    pub fn rotate(
        &self,
        conn: &mut PgConnection,
        name: &str,
        keep: Duration,
    ) -> Result<Option<SigningSecret>, DestinationError> {
        let secret = SigningSecret::random();
        let is_there = self.rotate_to(conn, name, &secret, keep)?;
        Ok(is_there.then_some(secret))
    }

    /// [`rotate`](Self::rotate) to a secret of your own: an asymmetric one, or the one that another system has signed with.
    /// `false`: there is none of this name.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::config::SigningSecret;
    /// use std::time::Duration;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let secret = SigningSecret::random_asymmetric()?;
    /// let day = Duration::from_secs(24 * 3600);
    /// outbox.destinations().rotate_to(&mut conn, "acme", &secret, day)?;
    /// // What the customer verifies requests with.
    /// let key = secret.public_key()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the database fails.
    pub fn rotate_to(
        &self,
        conn: &mut PgConnection,
        name: &str,
        secret: &SigningSecret,
        keep: Duration,
    ) -> Result<bool, DestinationError> {
        let sealed = self.sealed(name, secret)?;
        let new = sealed.expose_secret();
        Ok(store::rotate(conn, self.name, name, new, keep)?)
    }

    /// Encrypts all secrets that are plain, or encrypted with an older key, with the newest of the [given](Self::with_keys)
    /// keys. Returns how they were stored before. What cannot be read stays as it is.
    ///
    /// To change the key, give relays and applications both, the new one first, call this, and take the old one away.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let destinations = outbox.destinations().with_keys(&config.secret_keys);
    /// destinations.encrypt(&mut conn)?;
    /// let now = destinations.encryption(&mut conn)?;
    /// assert_eq!((now.plain, now.older), (0, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the database fails, or no key was given.
    pub fn encrypt(&self, conn: &mut PgConnection) -> Result<Encryption, DestinationError> {
        if self.keys.is_none() {
            return Err(ConfigError::new("OUTBOX_SECRET_KEY", "it is not set").into());
        }
        self.look_through(conn, |conn, name, column, opened| {
            let sealed = opened.iter().map(|one| self.sealed(name, &one.secret));
            let sealed = sealed.collect::<Result<Vec<_>, _>>()?;
            let words: Vec<&str> = sealed.iter().map(ExposeSecret::expose_secret).collect();
            let words = words.join(" ");
            Ok(store::replace_secrets(
                conn, self.name, name, column, &words,
            )?)
        })
    }

    /// How the secrets are stored, as far as the [given](Self::with_keys) keys tell.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let destinations = outbox.destinations().with_keys(&config.secret_keys);
    /// let found = destinations.encryption(&mut conn)?;
    /// println!("{} are not encrypted", found.plain);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the database fails.
    pub fn encryption(&self, conn: &mut PgConnection) -> Result<Encryption, DestinationError> {
        self.look_through(conn, |_, _, _, _| Ok(true))
    }

    /// Looks at the secrets of each destination, and does this to those that are not encrypted with the newest key.
    /// `false`: they have changed in the meantime.
    fn look_through(
        &self,
        conn: &mut PgConnection,
        mut old: impl FnMut(&mut PgConnection, &str, &str, &[Opened]) -> Result<bool, DestinationError>,
    ) -> Result<Encryption, DestinationError> {
        let mut found = Encryption::default();
        let mut after = String::new();
        loop {
            let page = store::secrets_behind(conn, self.name, &after, PAGE)?;
            let Some((last, _)) = page.last() else {
                return Ok(found);
            };
            after.clone_from(last);
            for (name, column) in page {
                let mut column = column;
                while let Some(text) = column.as_deref().filter(|text| !text.trim().is_empty()) {
                    let Ok(opened) = self.opened(&name, text) else {
                        found.unreadable.push(name);
                        break;
                    };
                    let has = |stored| opened.iter().any(|one| one.stored == stored);
                    let count = match (has(Stored::Plain), has(Stored::ByOlderKey)) {
                        (true, _) => &mut found.plain,
                        (false, true) => &mut found.older,
                        (false, false) => &mut found.newest,
                    };
                    let is_newest = !has(Stored::Plain) && !has(Stored::ByOlderKey);
                    if is_newest || old(conn, &name, text, &opened)? {
                        *count += 1;
                        break;
                    }
                    column = store::secret(conn, self.name, &name)?;
                }
            }
        }
    }

    /// A secret as it is stored.
    fn sealed(&self, name: &str, secret: &SigningSecret) -> Result<SecretString, DestinationError> {
        let sealed = match self.keys {
            None => Ok(secret.written()),
            Some(keys) => seal(keys, self.place(name), secret),
        };
        Ok(sealed.map_err(|reason| ConfigError::new("OUTBOX_SECRET_KEY", reason))?)
    }

    /// The secrets of a column.
    fn opened(&self, name: &str, column: &str) -> Result<Vec<Opened>, ConfigError> {
        let none = SecretKeys::default();
        open_all(self.keys.unwrap_or(&none), self.place(name), column)
            .map_err(|why| ConfigError::new(format!("destinations.{name}.secret"), why.to_string()))
    }

    fn place<'p>(&'p self, destination: &'p str) -> Place<'p> {
        Place {
            outbox: self.name,
            destination,
        }
    }

    /// Where keys are given, a secret that cannot be read is a problem.
    fn tell_of_secrets(
        &self,
        conn: &mut PgConnection,
        found: &mut [RegisteredDestination],
    ) -> Result<(), DestinationError> {
        if self.keys.is_none() || found.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = found.iter().map(|one| one.name.as_str()).collect();
        // In the same order, and perhaps without some that are gone by now.
        let secrets = store::secrets_of(conn, self.name, &names)?;
        let mut secrets = secrets.into_iter().peekable();
        for one in found {
            let secret = secrets.next_if(|(name, _)| *name == one.name);
            let column = secret.and_then(|(_, column)| column);
            let opened = self.opened(&one.name, column.as_deref().unwrap_or_default());
            if let (None, Err(error)) = (&one.problem, opened) {
                one.problem = Some(error.to_string());
            }
        }
        Ok(())
    }

    /// What became of its messages, the newest first, `limit` at most: what waits for it, its dead letters, and what it
    /// got. What was discarded or cancelled is not there, and neither is a new message before a relay has seen that it
    /// is for this destination.
    ///
    /// What waits and what is dead is found by indexes. What it got is searched for in the ledger from its end on, for
    /// two seconds at most: no index by destination makes every delivery dearer. So a destination that gets little,
    /// beside others that get very much, may have pages with few rows; [`Deliveries::next`] goes on behind them.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::destinations::DeliveryFilter;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let mut filter = DeliveryFilter::default();
    /// loop {
    ///     let page = outbox.destinations().deliveries(&mut conn, "acme", &filter, 50)?;
    ///     for delivery in &page.rows {
    ///         println!("{} {} {}", delivery.created_at, delivery.topic, delivery.state);
    ///     }
    ///     filter.after = page.next;
    ///     if filter.after.is_none() {
    ///         break;
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the database fails.
    pub fn deliveries(
        &self,
        conn: &mut PgConnection,
        name: &str,
        filter: &DeliveryFilter,
        limit: usize,
    ) -> Result<Deliveries, DestinationError> {
        Ok(pinned(conn, self.name, |conn, outbox| {
            deliveries::deliveries(conn, outbox, name, filter, limit)
        })?)
    }

    /// How many of its messages were delivered and how many died, in each of `windows` spans of time, the oldest first;
    /// the last one ends now. `None`: two seconds were not enough to count it.
    ///
    /// ```no_run
    /// use std::time::Duration;
    ///
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let minute = Duration::from_secs(60);
    /// for count in outbox.destinations().delivery_counts(&mut conn, "acme", minute, 60)? {
    ///     match count {
    ///         Some(count) => println!("{} delivered, {} dead", count.delivered, count.dead),
    ///         None => println!("not known"),
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the database fails.
    pub fn delivery_counts(
        &self,
        conn: &mut PgConnection,
        name: &str,
        window: Duration,
        windows: usize,
    ) -> Result<Vec<Option<DeliveryCount>>, DestinationError> {
        Ok(pinned(conn, self.name, |conn, outbox| {
            deliveries::counts(conn, outbox, name, window, windows)
        })?)
    }

    /// Sends a message there once more, and nowhere else: one that was delivered there, or a dead letter. It has the
    /// same message id, so a receiver that knows what it has handled leaves it alone. One that was delivered has no
    /// stored headers any more, as the ledger keeps none.
    ///
    /// Twice in a row sends once: where it waits to be sent again, nothing is done, and the answer is `true`. `false`:
    /// there is no such destination, or no such message among what it got and its dead letters.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::destinations::DestinationError;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// // Of a form: the `webhook-id` that the customer asks about.
    /// let message_id = "0198b2f1-6a3e-7c11-9d3f-0c8f1d1b2a3c".parse()?;
    /// match outbox.destinations().send_again(&mut conn, "acme", message_id) {
    ///     Ok(true) => println!("it is on its way"),
    ///     Ok(false) => println!("there is no such delivery"),
    ///     Err(DestinationError::PayloadNotKept { .. }) => println!("we do not keep it"),
    ///     Err(error) => Err(error)?,
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`DestinationError::PayloadNotKept`]: it was delivered, and only `OUTBOX_LEDGER_PAYLOAD` keeps payloads.
    pub fn send_again(
        &self,
        conn: &mut PgConnection,
        name: &str,
        message_id: Uuid,
    ) -> Result<bool, DestinationError> {
        let sent = pinned(conn, self.name, |conn, outbox| {
            if store::get(conn, outbox, name)?.is_none() {
                return Ok(SentAgain::NotFound);
            }
            deliveries::send_again(conn, outbox, name, message_id, SENT_AGAIN_BY)
        })?;
        match sent {
            SentAgain::Yes => Ok(true),
            SentAgain::NotFound => Ok(false),
            SentAgain::NotKept => Err(DestinationError::PayloadNotKept { message_id }),
        }
    }

    /// Prepares a test: an event `outbox.test`, signed and shaped as what the destination gets otherwise, that is in no
    /// outbox. [`send`](DestinationTest::send) sends it at once, also to one that is disabled, and needs no connection.
    /// `None`: there is none of this name.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let test = outbox.destinations().test(&mut conn, "acme", &config)?;
    /// // The answer may take seconds: give the connection back before.
    /// drop(conn);
    /// if let Some(answer) = test.map(|test| test.send()) {
    ///     println!("{:?} after {} ms", answer.http_status, answer.took.as_millis());
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`DestinationError::Invalid`]: a relay with these settings would not use it.
    #[cfg(feature = "http")]
    pub fn test(
        &self,
        conn: &mut PgConnection,
        name: &str,
        config: &Config,
    ) -> Result<Option<DestinationTest>, DestinationError> {
        let found = pinned(conn, self.name, |conn, outbox| {
            store::registered_as(conn, outbox, &[name.to_owned()])
        })?;
        let Some(store::Registered { row, secrets }) = found.into_iter().next() else {
            return Ok(None);
        };
        if let Some(problem) = &row.problem {
            return Err(ConfigError::new(format!("destinations.{name}"), problem).into());
        }
        let config = Config {
            table: self.name.clone(),
            ..config.clone()
        };
        let keys = self.keys.unwrap_or(&config.secret_keys);
        let text = secrets.as_ref().map_or("", ExposeSecret::expose_secret);
        let secrets = self.with_keys(keys).opened(name, text)?;
        let secrets = secrets.into_iter().map(|one| one.secret).collect();
        Ok(Some(DestinationTest::new(&row, secrets, &config)?))
    }
}

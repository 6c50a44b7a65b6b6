//! Registers, changes, pauses and removes endpoints, and keeps their secrets.

use std::collections::HashMap;
use std::sync::LazyLock;
use std::time::Duration;

use diesel::PgConnection;
use secrecy::{ExposeSecret, SecretString};
use uuid::Uuid;

use super::endpoint::Endpoint;
use super::sealed::{Opened, SecretRow, StoredSecret, open_all, open_auth, seal};
use super::sql::rows::{self as store, EndpointFilter, Secrets, WhichEndpoint};
#[cfg(feature = "http")]
use crate::config::Config;
use crate::config::{Auth, ConfigError, PolicyOption, SecretKeys, SigningSecret};
#[cfg(feature = "http")]
use crate::dispatch::EndpointRefusal;
use crate::endpoints::sql::served;
use crate::engine::send::sql::pause::{self, Pausable};
use crate::error::DatabaseError;
use crate::hand::Hand;
use crate::name::OutboxName;
use crate::outbox::Outbox;
use crate::setup::sql::inspect::has_feeds;
use crate::sql::pinned::pinned;

/// Why an endpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// A value cannot be used. Nothing was written.
    #[error(transparent)]
    Invalid(#[from] ConfigError),
    /// The settings do not allow the endpoint: they require `https`, a public address or other ports, for example.
    /// Only [`Endpoints::test`] returns this error; other relays may have other settings.
    #[error("{0}")]
    Refused(String),
    /// The tenant has reached [the limit](super#a-limit-for-each-tenant). The caller's transaction can continue.
    #[error(transparent)]
    TooMany(diesel::result::Error),
    /// The database refused or failed. The caller's transaction can continue, unless the connection failed.
    #[error(transparent)]
    Database(diesel::result::Error),
    /// An operator has set this, and only an operator changes it: another hand may neither enable what an operator has
    /// disabled, nor resume what an operator has paused, nor change a value that an operator has set. Nothing was written.
    #[error("{0}: set by an operator, and only an operator changes it")]
    SetByOperator(String),
    /// The outbox has no tables of endpoints. Relays deliver to other destinations without them.
    #[error(
        "the outbox {0} has no tables of endpoints: `diesel-outbox migrate --with endpoints` creates them, \
         or SELECT outbox_create_endpoints('{0}') in a migration of yours"
    )]
    NoTables(OutboxName),
    /// The message was delivered and cannot be sent again, because the ledger did not keep its payload.
    #[error(
        "message {message_id} was delivered, and the ledger did not keep its payload: set OUTBOX_LEDGER_PAYLOAD=true \
         to be able to send later deliveries again"
    )]
    PayloadNotKept {
        /// The id of the message.
        message_id: Uuid,
    },
}

impl EndpointError {
    /// The error for the customer who registered the endpoint: without names of settings, and without details of the
    /// database.
    ///
    /// ```
    /// use diesel_outbox::endpoints::{EndpointError, Endpoint};
    ///
    /// let hook = Endpoint::new("acme", "acme.example");
    /// let error = EndpointError::from(hook.check().unwrap_err());
    /// assert!(error.public_error().starts_with("url: "));
    /// ```
    pub fn public_error(&self) -> String {
        match self {
            Self::Invalid(error) => {
                let (_, field) = error.key().rsplit_once('.').unwrap_or(("", error.key()));
                format!("{field}: {}", error.reason())
            }
            Self::Refused(_) => {
                "the URL is not allowed here: use https and a host with a public address".to_owned()
            }
            Self::SetByOperator(_) => "this was set by us: contact our support".to_owned(),
            Self::TooMany(_) => "no more endpoints can be registered".to_owned(),
            Self::NoTables(_) => "endpoints are not available here".to_owned(),
            Self::Database(_) => "the request could not be processed: try again later".to_owned(),
            Self::PayloadNotKept { .. } => "the message is no longer available".to_owned(),
        }
    }
}

#[cfg(feature = "http")]
impl From<EndpointRefusal> for EndpointError {
    fn from(error: EndpointRefusal) -> Self {
        match error {
            EndpointRefusal::Invalid(error) => Self::Invalid(error),
            EndpointRefusal::NotHere(why) => Self::Refused(why),
        }
    }
}

impl From<diesel::result::Error> for EndpointError {
    fn from(error: diesel::result::Error) -> Self {
        match store::exceeds_limit(&error) {
            true => Self::TooMany(error),
            false => Self::Database(error),
        }
    }
}

impl From<DatabaseError> for EndpointError {
    fn from(error: DatabaseError) -> Self {
        match error {
            DatabaseError::Statement(error) => error.into(),
            other => Self::Database(diesel::result::Error::QueryBuilderError(Box::new(other))),
        }
    }
}

/// The endpoints of an outbox: see [the module](super).
///
/// Every method works in the caller's transaction, if one is open. An error undoes only the call, and the transaction
/// can continue. Relays see a change after the commit.
#[derive(Debug, Clone, Copy)]
pub struct Endpoints<'a> {
    pub(crate) name: &'a OutboxName,
    keys: &'a SecretKeys,
    /// Every statement about an endpoint or a message has this condition.
    pub(crate) tenant: Option<Uuid>,
}

/// How the secrets of endpoints are stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Encryption {
    /// Endpoints whose secrets are all encrypted with the newest key.
    pub newest: usize,
    /// Endpoints with a secret that is encrypted with an older key, and no unencrypted secret.
    pub older: usize,
    /// Endpoints with an unencrypted secret.
    pub plain: usize,
    /// The names of endpoints with a secret that cannot be read. No relay sends to these endpoints.
    pub unreadable: Vec<String>,
}

fn not_available(name: &str, reason: impl Into<String>) -> EndpointError {
    ConfigError::new(format!("destinations.{name}.name"), reason).into()
}

/// The default of [`Endpoints::with_keys`].
static NO_KEYS: LazyLock<SecretKeys> = LazyLock::new(SecretKeys::default);

/// The secrets of a row that could be read.
type OpenedSecrets = (Vec<Opened>, Option<Opened<Auth>>);

/// The number of endpoints whose secrets one statement reads.
const PAGE: i64 = 500;

impl Outbox {
    /// The endpoints of the outbox.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let acme = outbox.endpoints().get(&mut conn, "acme")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn endpoints(&self) -> Endpoints<'_> {
        Endpoints {
            name: self.name(),
            keys: &NO_KEYS,
            tenant: None,
        }
    }
}

impl<'a> Endpoints<'a> {
    /// Sets the keys that encrypt secrets in the database: [`Config::secret_keys`](crate::config::Config::secret_keys). Relays
    /// need the same keys. Defaults to no keys: new secrets are stored unencrypted, and encrypted secrets cannot be
    /// read.
    ///
    /// With keys, [`get`](Self::get) and [`list`](Self::list) also read the secrets. An endpoint whose secret cannot
    /// be decrypted has a [`problem`](Endpoint::problem).
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let endpoints = outbox.endpoints().with_keys(&config.secret_keys);
    /// let secret = endpoints.secret(&mut conn, "acme")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_keys(self, keys: &'a SecretKeys) -> Self {
        Self { keys, ..self }
    }

    /// Limits everything to the endpoints and the messages of this tenant: for the pages of a customer. Others do not
    /// exist for these methods, even by their name. Every statement has the condition. What [`put`](Self::put) registers
    /// is the tenant's; [`encrypt`](Self::encrypt) and [`encryption`](Self::encryption) are for operators, and see all
    /// endpoints. Defaults to all tenants.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    ///
    /// # let tenant = uuid::Uuid::nil();
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// // The name comes from a form. `false`: the tenant has no such endpoint.
    /// let removed = outbox.endpoints().of_tenant(tenant).remove(&mut conn, "acme")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn of_tenant(self, tenant: Uuid) -> Self {
        let tenant = Some(tenant);
        Self { tenant, ..self }
    }

    pub(crate) fn which<'n>(&self, name: &'n str) -> WhichEndpoint<'n> {
        let tenant = self.tenant;
        WhichEndpoint { name, tenant }
    }

    /// Runs `work` on an outbox that has endpoints, as [`pinned`] does.
    pub(crate) fn pinned<T, E: Into<EndpointError>>(
        &self,
        conn: &mut PgConnection,
        work: impl FnOnce(&mut PgConnection, &OutboxName) -> Result<T, E>,
    ) -> Result<T, EndpointError> {
        pinned(conn, self.name, |conn, outbox| {
            if !outbox.has_endpoints() {
                return Err(EndpointError::NoTables(self.name.clone()));
            }
            work(conn, outbox).map_err(Into::into)
        })
    }

    /// Whose changes these are: those of [one tenant](Self::of_tenant) are its owner's, all others an operator's.
    pub(super) fn hand(&self) -> Hand {
        match self.tenant {
            Some(_) => Hand::Owner,
            None => Hand::Operator,
        }
    }

    /// Declares an endpoint, for code that runs at each start: registers it with a new secret, or
    /// [its own](Endpoint::secret). If the name exists, replaces what no operator has
    /// [set](Endpoint::set_by), and the secrets only if it has its own. It never enables an endpoint. If the URL
    /// or the verification changes, the endpoint is no longer verified. [`change`](Self::change) changes single values.
    ///
    /// # Errors
    /// - [`EndpointError::Invalid`], which names the value that cannot be used. Also if the endpoint is from
    ///   [`get`](Self::get) or [`list`](Self::list) and its row has a value that could not be read: the value would be
    ///   lost. And if the name is new, and a running relay has an endpoint or a group of handlers of this name in its
    ///   settings; or if it is a feed, and the outbox has no tables of feeds.
    /// - [`EndpointError::TooMany`]: the tenant has reached its limit.
    /// - [`EndpointError::Database`]: the database failed.
    pub fn put(
        &self,
        conn: &mut PgConnection,
        destination: &Endpoint,
    ) -> Result<(), EndpointError> {
        if destination.is_unread {
            return Err(unread(destination).into());
        }
        destination.check()?;
        let name = &destination.name;
        let mut one = destination.clone();
        one.tenant_id = self.tenant.or(one.tenant_id);
        let own = one.secret.take();
        let secret = own.clone().unwrap_or_else(SigningSecret::random);
        let secret = self.sealed(name, &secret.written())?;
        let auth = self.sealed_auth(&one)?;
        let auth = auth.as_ref().map(ExposeSecret::expose_secret);
        let put = self.pinned(conn, |conn, outbox| {
            if one.is_feed() && !has_feeds(conn, outbox)? {
                let reason = match self.tenant {
                    Some(_) => "feeds are not available here".to_owned(),
                    None => format!(
                        "the outbox {0} has no tables of feeds: `diesel-outbox migrate --with feeds` creates them, or \
                         SELECT outbox_create_feeds('{0}') in a migration of yours",
                        self.name
                    ),
                };
                return Err(ConfigError::new(format!("destinations.{name}.kind"), reason).into());
            }
            // Of two endpoints of one name, nobody could tell which one is meant.
            let is_new = !store::exists(conn, outbox, name)?;
            let relay = is_new.then(|| served::relay_with(conn, outbox, name));
            if let Some(relay) = relay.transpose()?.flatten() {
                let reason = match self.tenant {
                    Some(_) => "the name is not available".to_owned(),
                    None => format!(
                        "the settings of the relay {relay} have an endpoint of this name: choose another one"
                    ),
                };
                return Err(not_available(name, reason));
            }
            loop {
                let secret = (!one.is_feed()).then(|| secret.expose_secret());
                if store::insert(conn, outbox, &one, (secret, auth))? {
                    return Ok(());
                }
                let declared = |row: &mut Endpoint| {
                    row.secret.clone_from(&own);
                    declare(&one, row)
                };
                if self.change_in(conn, outbox, name, Hand::Owner, declared)? {
                    return Ok(());
                }
                if store::exists(conn, outbox, name)? {
                    return Err(not_available(name, "the name is not available"));
                }
            }
        });
        put.map_err(|error| of_value(name, error))
    }

    /// Changes an endpoint: `change` gets the row, which is locked until the end of the transaction, and what it changes
    /// is written. All other values stay as they are, also those that others change at the same time. `false`: the
    /// endpoint does not exist.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let is_there = outbox.endpoints().change(&mut conn, "acme", |row| {
    ///     row.topics.push("invoice.*".to_owned());
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// With [`of_tenant`](Self::of_tenant), the change is the owner's; otherwise it is an operator's. A value that an operator
    /// has set is [recorded](Endpoint::set_by), and only operators change it.
    ///
    /// # Errors
    /// - [`EndpointError::Invalid`], which names the value that cannot be used.
    /// - [`EndpointError::SetByOperator`]: the owner cannot change this.
    /// - [`EndpointError::TooMany`]: the new tenant has reached its limit.
    /// - [`EndpointError::Database`]: the database failed.
    pub fn change(
        &self,
        conn: &mut PgConnection,
        name: &str,
        change: impl FnOnce(&mut Endpoint),
    ) -> Result<bool, EndpointError> {
        let change = |row: &mut Endpoint| {
            change(row);
            Ok(())
        };
        let changed = self.pinned(conn, |conn, outbox| {
            self.change_in(conn, outbox, name, self.hand(), change)
        });
        changed.map_err(|error| of_value(name, error))
    }

    /// Every change of a row's values, by whatever interface.
    // Why: docs/decisions.md#hands
    fn change_in(
        &self,
        conn: &mut PgConnection,
        outbox: &OutboxName,
        name: &str,
        by: Hand,
        change: impl FnOnce(&mut Endpoint) -> Result<(), ConfigError>,
    ) -> Result<bool, EndpointError> {
        let Some(found) = store::lock(conn, outbox, self.which(name))? else {
            return Ok(false);
        };
        let mut before = [found];
        self.report_secrets(conn, outbox, &mut before)?;
        let [before] = before;
        let mut after = before.clone();
        change(&mut after)?;
        after.name.clone_from(&before.name);
        after.tenant_id = self.tenant.or(after.tenant_id);
        if after.kind != before.kind {
            let key = format!("destinations.{name}.kind");
            let reason = format!("the endpoint is a {}, and stays one", before.kind);
            return Err(ConfigError::new(key, reason).into());
        }
        settle_enabled(&before, &mut after, by)?;
        let mut changed = store::differing(&before, &after);
        if before.is_unread && !after.is_unread {
            // What was declared replaces what cannot be read.
            changed.retain(|value| !store::is_recorded(value));
            let of_operator = |value: &&str| before.set_by.get(*value) == Some(&Hand::Operator);
            changed.extend(store::recorded().filter(|value| !of_operator(value)));
        } else if before.is_unread && changed.iter().any(|value| store::is_recorded(value)) {
            return Err(unread(&before).into());
        }
        if changed.iter().any(|value| *value != "enabled") {
            after.check()?;
        }
        for value in changed.iter().filter(|value| store::is_recorded(value)) {
            if by != Hand::Operator && before.set_by.get(*value) == Some(&Hand::Operator) {
                return Err(EndpointError::SetByOperator((*value).to_owned()));
            }
            after.set_by.insert((*value).to_owned(), by);
        }
        // Nobody has set what has its default.
        let set = store::differing(&Endpoint::new("", ""), &after);
        after
            .set_by
            .retain(|value, _| set.contains(&value.as_str()));
        let auth = self.sealed_auth(&after)?;
        let auth = auth.as_ref().map(ExposeSecret::expose_secret);
        let written = before
            .auth
            .as_ref()
            .map(|one| one.written().expose_secret());
        // The same in clear text: with a key, it is sealed now.
        let is_clear = before.auth.as_ref().is_some_and(|one| !one.is_sealed());
        if is_clear && auth != written && !changed.contains(&"auth") {
            changed.push("auth");
        }
        if !changed.is_empty() {
            store::write(conn, outbox, &after, &changed, auth)?;
        }
        if let Some(secret) = &after.secret {
            let sealed = self.sealed(name, &secret.written())?;
            let secret = sealed.expose_secret();
            store::rotate(conn, outbox, self.which(name), secret, Duration::ZERO)?;
        }
        Ok(true)
    }

    /// The authentication in its stored form.
    fn sealed_auth(&self, one: &Endpoint) -> Result<Option<SecretString>, EndpointError> {
        let sealed = one.auth.as_ref().map(|auth| match auth.is_sealed() {
            true => Ok(auth.written().clone()),
            false => self.sealed(&one.name, auth.written()),
        });
        sealed.transpose()
    }

    /// The endpoint of this name; `None`: it does not exist.
    ///
    /// # Errors
    /// If the database fails.
    pub fn get(
        &self,
        conn: &mut PgConnection,
        name: &str,
    ) -> Result<Option<Endpoint>, EndpointError> {
        self.pinned(conn, |conn, outbox| {
            let mut found: Vec<_> = store::get(conn, outbox, self.which(name))?
                .into_iter()
                .collect();
            self.report_secrets(conn, outbox, &mut found)?;
            store::read_states(conn, outbox, &mut found)?;
            report_refusals(conn, outbox, &mut found)?;
            Ok::<_, EndpointError>(found.pop())
        })
    }

    /// At most `limit` endpoints, ordered by name.
    ///
    /// # Errors
    /// If the database fails.
    pub fn list(
        &self,
        conn: &mut PgConnection,
        filter: &EndpointFilter,
        limit: usize,
    ) -> Result<Vec<Endpoint>, EndpointError> {
        self.pinned(conn, |conn, outbox| {
            let mut found = store::list(conn, outbox, (filter, self.tenant), limit)?;
            self.report_secrets(conn, outbox, &mut found)?;
            store::read_states(conn, outbox, &mut found)?;
            report_refusals(conn, outbox, &mut found)?;
            Ok::<_, EndpointError>(found)
        })
    }

    /// Enables an endpoint: its messages are sent again, those that have failed at the time of their next attempt, and new
    /// messages are for it. `false`: the endpoint does not exist.
    ///
    /// # Errors
    /// - [`EndpointError::SetByOperator`]: an operator has disabled it, and this is [the owner](Self::of_tenant).
    /// - [`EndpointError::Database`]: the database failed.
    pub fn enable(&self, conn: &mut PgConnection, name: &str) -> Result<bool, EndpointError> {
        self.change(conn, name, |row| row.enabled = true)
    }

    /// Disables an endpoint: it gets no new messages, and those already addressed to it wait. `false`: the
    /// endpoint does not exist. [`recover`](Self::recover) sends what the endpoint has missed, if the ledger keeps
    /// payloads. To let new messages wait, too, [`pause`](Self::pause) the endpoint.
    ///
    /// # Errors
    /// If the database fails.
    pub fn disable(
        &self,
        conn: &mut PgConnection,
        name: &str,
        reason: &str,
    ) -> Result<bool, EndpointError> {
        let by = self.hand();
        self.change(conn, name, |row| {
            // What an operator has disabled stays so for the owner.
            if by == Hand::Operator || !row.is_disabled_by_operator() {
                row.enabled = false;
                row.disabled_by = Some(by);
                row.disabled_reason = Some(reason.to_owned());
            }
        })
    }

    /// Pauses an endpoint, for a time or until it is resumed: new messages are addressed to it, and all its messages wait
    /// without using attempts. Relays notice the pause within a second. A longer pause of the same hand stays; each hand has a
    /// pause of its own. `false`: the endpoint does not exist.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use std::time::Duration;
    ///
    /// # let tenant = uuid::Uuid::nil();
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let own = outbox.endpoints().of_tenant(tenant);
    /// let hour = Some(Duration::from_secs(3600));
    /// own.pause(&mut conn, "acme", "our server is upgraded", hour)?;
    /// own.resume(&mut conn, "acme")?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails.
    pub fn pause(
        &self,
        conn: &mut PgConnection,
        name: &str,
        reason: &str,
        lasts: Option<Duration>,
    ) -> Result<bool, EndpointError> {
        let by = (self.hand(), reason);
        self.pinned(conn, |conn, outbox| {
            let is_there = store::hold(conn, outbox, self.which(name))?;
            if is_there {
                pause::pause(conn, outbox, Pausable::Destination, name, by, lasts, 0)?;
            }
            Ok::<_, diesel::result::Error>(is_there)
        })
    }

    /// Ends the pauses of an endpoint: its messages are sent at once. For the owner: those of the owner, of the receiver and
    /// of the circuit breaker. For an operator: as [`admin::resume`](crate::admin::resume). `false`: the endpoint does not
    /// exist.
    ///
    /// ```no_run
    /// # use diesel::prelude::*;
    /// # let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// # let outbox = diesel_outbox::Outbox::new("outbox")?;
    /// let is_there = outbox.endpoints().resume(&mut conn, "acme")?;
    /// # let _ = is_there;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// - [`EndpointError::SetByOperator`]: an operator has paused it, and this is [the owner](Self::of_tenant).
    /// - [`EndpointError::Database`]: the database failed.
    pub fn resume(&self, conn: &mut PgConnection, name: &str) -> Result<bool, EndpointError> {
        self.pinned(conn, |conn, outbox| {
            if !store::hold(conn, outbox, self.which(name))? {
                return Ok(false);
            }
            let resumed = match self.hand() {
                Hand::Owner => pause::resume_as_owner(conn, outbox, name)?,
                _ => Some(pause::resume(conn, outbox, Pausable::Destination, name)?),
            };
            match resumed {
                Some(_) => Ok(true),
                None => Err(EndpointError::SetByOperator("pause".to_owned())),
            }
        })
    }

    /// Removes an endpoint: its waiting messages end as cancelled ones do, in the ledger only
    /// (`DESTINATION_REMOVED`). `false`: the endpoint does not exist.
    ///
    /// # Errors
    /// If the database fails.
    pub fn remove(&self, conn: &mut PgConnection, name: &str) -> Result<bool, EndpointError> {
        self.pinned(conn, |conn, outbox| {
            store::remove(conn, outbox, self.which(name))
        })
    }

    /// The newest secret of an endpoint. `None`: the endpoint does not exist, or has no secret.
    ///
    /// # Errors
    /// If the database fails, or a secret cannot be read: the column contains something else, or the secret is
    /// encrypted with a key that was not [given](Self::with_keys).
    pub fn secret(
        &self,
        conn: &mut PgConnection,
        name: &str,
    ) -> Result<Option<SigningSecret>, EndpointError> {
        let found = self.pinned(conn, |conn, outbox| {
            store::secrets(conn, outbox, self.which(name))
        })?;
        let Some(text) = found.and_then(|found| found.secret) else {
            return Ok(None);
        };
        let mut secrets = self.opened(name, &text)?.into_iter();
        Ok(secrets.next().map(|newest| newest.secret))
    }

    /// Adds a new symmetric secret. The existing secrets keep signing for `keep`. `None`: the endpoint does not
    /// exist.
    ///
    /// # Errors
    /// - [`EndpointError::Invalid`]: the secret cannot be encrypted, or `keep` is not zero and an existing secret cannot
    ///   be read.
    /// - [`EndpointError::Database`]: the database failed.
    pub fn rotate(
        &self,
        conn: &mut PgConnection,
        name: &str,
        keep: Duration,
    ) -> Result<Option<SigningSecret>, EndpointError> {
        let secret = SigningSecret::random();
        let is_there = self.rotate_to(conn, name, &secret, keep)?;
        Ok(is_there.then_some(secret))
    }

    /// [`rotate`](Self::rotate) to a secret of your own: an asymmetric secret, or the secret of another system that you
    /// replace. `false`: the endpoint does not exist.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::Outbox;
    /// use diesel_outbox::config::SigningSecret;
    /// use std::time::Duration;
    ///
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let secret = SigningSecret::random_asymmetric();
    /// let day = Duration::from_secs(24 * 3600);
    /// outbox.endpoints().rotate_to(&mut conn, "acme", &secret, day)?;
    /// // The customer verifies requests with this key.
    /// let key = secret.public_key()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// - [`EndpointError::Invalid`]: the secret cannot be encrypted, or `keep` is not zero and an existing secret cannot
    ///   be read.
    /// - [`EndpointError::Database`]: the database failed.
    pub fn rotate_to(
        &self,
        conn: &mut PgConnection,
        name: &str,
        secret: &SigningSecret,
        keep: Duration,
    ) -> Result<bool, EndpointError> {
        if !keep.is_zero() {
            // A relay sends nothing while it cannot read one of the secrets.
            self.secret(conn, name)?;
        }
        let sealed = self.sealed(name, &secret.written())?;
        let rotated = self.pinned(conn, |conn, outbox| {
            store::rotate(conn, outbox, self.which(name), sealed.expose_secret(), keep)
        });
        // A feed has no secret.
        rotated.map_err(|error| of_value(name, error))
    }

    /// Encrypts secrets with the newest of the [given](Self::with_keys) keys, if they are unencrypted or encrypted with
    /// an older key. Returns how the secrets were stored before. Secrets that cannot be read stay unchanged.
    ///
    /// To change the key, give both keys to relays and applications, the new key first. Then call this method, and
    /// remove the old key.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let endpoints = outbox.endpoints().with_keys(&config.secret_keys);
    /// endpoints.encrypt(&mut conn)?;
    /// let now = endpoints.encryption(&mut conn)?;
    /// assert_eq!((now.plain, now.older), (0, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails, or no key was given.
    pub fn encrypt(&self, conn: &mut PgConnection) -> Result<Encryption, EndpointError> {
        if self.keys.is_empty() {
            return Err(ConfigError::new("OUTBOX_SECRET_KEY", "it is not set").into());
        }
        self.look_through(conn, |conn, outbox, before, (secrets, auth)| {
            let seal = |written: &SecretString| {
                let sealed = self.sealed(&before.name, written)?;
                Ok::<_, EndpointError>(sealed.expose_secret().to_owned())
            };
            let words = secrets.iter().map(|one| seal(&one.secret.written()));
            let words = words.collect::<Result<Vec<_>, _>>()?;
            let auth = auth.as_ref().map(|one| seal(one.secret.written()));
            let after = Secrets {
                name: before.name.clone(),
                secret: (!words.is_empty()).then(|| words.join(" ")),
                auth: auth.transpose()?,
            };
            Ok(store::replace_secrets(conn, outbox, before, &after)?)
        })
    }

    /// How the secrets are stored. Secrets that the [given](Self::with_keys) keys do not decrypt count as unreadable.
    ///
    /// ```no_run
    /// use diesel::prelude::*;
    /// use diesel_outbox::{Outbox, config};
    ///
    /// let config = config::from_env()?;
    /// let mut conn = PgConnection::establish("postgres://localhost/shop")?;
    /// let outbox = Outbox::new("outbox")?;
    /// let endpoints = outbox.endpoints().with_keys(&config.secret_keys);
    /// let found = endpoints.encryption(&mut conn)?;
    /// println!("{} are not encrypted", found.plain);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the database fails.
    pub fn encryption(&self, conn: &mut PgConnection) -> Result<Encryption, EndpointError> {
        self.look_through(conn, |_, _, _, _| Ok(true))
    }

    /// Reads the secrets of each endpoint, and calls `old` if they are not all encrypted with the newest key. If
    /// `old` returns `false`, the secrets have changed in the meantime, and are read again. Outside a transaction of
    /// the caller's, each page has a transaction of its own: an error of `old` undoes this page only.
    fn look_through(
        &self,
        conn: &mut PgConnection,
        mut old: impl FnMut(
            &mut PgConnection,
            &OutboxName,
            &Secrets,
            OpenedSecrets,
        ) -> Result<bool, EndpointError>,
    ) -> Result<Encryption, EndpointError> {
        let mut found = Encryption::default();
        let mut after = String::new();
        loop {
            let last = self.pinned(conn, |conn, outbox| {
                let page = store::secrets_behind(conn, outbox, &after, PAGE)?;
                let last = page.last().map(|row| row.name.clone());
                for row in page {
                    let mut row = Some(row);
                    while let Some(one) = row {
                        let Ok((secrets, auth)) = self.opened_all(&one) else {
                            found.unreadable.push(one.name);
                            break;
                        };
                        let stored = secrets.iter().map(|one| one.stored);
                        let stored: Vec<_> =
                            stored.chain(auth.as_ref().map(|one| one.stored)).collect();
                        let has = |one| stored.contains(&one);
                        let count = match (has(StoredSecret::Plain), has(StoredSecret::ByOlderKey))
                        {
                            _ if stored.is_empty() => break,
                            (true, _) => &mut found.plain,
                            (false, true) => &mut found.older,
                            (false, false) => &mut found.newest,
                        };
                        let is_newest = !has(StoredSecret::Plain) && !has(StoredSecret::ByOlderKey);
                        if is_newest || old(conn, outbox, &one, (secrets, auth))? {
                            *count += 1;
                            break;
                        }
                        row = store::secrets(
                            conn,
                            outbox,
                            WhichEndpoint {
                                name: &one.name,
                                tenant: None,
                            },
                        )?;
                    }
                }
                Ok::<_, EndpointError>(last)
            })?;
            match last {
                Some(last) => after = last,
                None => return Ok(found),
            }
        }
    }

    /// The secret in its stored form.
    fn sealed(&self, name: &str, written: &SecretString) -> Result<SecretString, EndpointError> {
        let sealed = seal(self.keys, self.place(name), written);
        Ok(sealed.map_err(|reason| ConfigError::new("OUTBOX_SECRET_KEY", reason))?)
    }

    /// The secrets of a column.
    fn opened(&self, name: &str, column: &str) -> Result<Vec<Opened>, ConfigError> {
        open_all(self.keys, self.place(name), column)
            .map_err(|why| ConfigError::new(format!("destinations.{name}.secret"), why.to_string()))
    }

    /// The authentication of a column.
    fn opened_auth(&self, name: &str, column: &str) -> Result<Opened<Auth>, ConfigError> {
        open_auth(self.keys, self.place(name), column)
            .map_err(|why| ConfigError::new(format!("destinations.{name}.auth"), why.to_string()))
    }

    /// Everything that a row keeps secret.
    fn opened_all(&self, row: &Secrets) -> Result<OpenedSecrets, ConfigError> {
        let secrets = self.opened(&row.name, row.secret.as_deref().unwrap_or_default())?;
        let auth = row.auth.as_deref();
        let auth = auth.map(|column| self.opened_auth(&row.name, column));
        Ok((secrets, auth.transpose()?))
    }

    fn place<'p>(&'p self, destination: &'p str) -> SecretRow<'p> {
        SecretRow {
            outbox: self.name,
            destination,
        }
    }

    /// If keys are given, decrypts the authentication of each endpoint, and sets the problem of each endpoint whose
    /// secrets cannot be read.
    fn report_secrets(
        &self,
        conn: &mut PgConnection,
        outbox: &OutboxName,
        found: &mut [Endpoint],
    ) -> Result<(), EndpointError> {
        if self.keys.is_empty() || found.is_empty() {
            return Ok(());
        }
        let names: Vec<&str> = found.iter().map(|one| one.name.as_str()).collect();
        // In the same order, without endpoints that were removed in the meantime.
        let secrets = store::secrets_of(conn, outbox, &names)?;
        let mut secrets = secrets.into_iter().peekable();
        for one in found {
            let Some(row) = secrets.next_if(|row| row.name == one.name) else {
                continue;
            };
            match self.opened_all(&row) {
                Ok((_, Some(auth))) => one.auth = Some(auth.secret),
                Ok((_, None)) => {}
                Err(error) => {
                    one.problem.get_or_insert_with(|| error.to_string());
                }
            }
        }
        Ok(())
    }

    /// An endpoint that a relay could send to, its secrets, and the settings for it.
    #[cfg(feature = "http")]
    pub(crate) fn ready(
        &self,
        conn: &mut PgConnection,
        name: &str,
        config: &Config,
    ) -> Result<Option<(Endpoint, Vec<SigningSecret>, Config)>, EndpointError> {
        let found = self.pinned(conn, |conn, outbox| {
            store::endpoint_row(conn, outbox, self.which(name))
        })?;
        let Some(store::EndpointRow {
            mut row, secrets, ..
        }) = found
        else {
            return Ok(None);
        };
        if let Some(problem) = &row.problem {
            return Err(ConfigError::new(format!("destinations.{name}"), problem).into());
        }
        let config = Config {
            table: self.name.clone(),
            ..config.clone()
        };
        let keys = match self.keys.is_empty() {
            true => &config.secret_keys,
            false => self.keys,
        };
        let text = secrets.as_ref().map_or("", ExposeSecret::expose_secret);
        let opening = self.with_keys(keys);
        let secrets = opening.opened(name, text)?;
        if let Some(auth) = &row.auth {
            let opened = opening.opened_auth(name, auth.written().expose_secret())?;
            row.auth = Some(opened.secret);
        }
        let secrets = secrets.into_iter().map(|one| one.secret).collect();
        Ok(Some((row, secrets, config)))
    }
}

/// Why a row with a value that cannot be read is not written.
fn unread(one: &Endpoint) -> ConfigError {
    let problem = one.problem.as_deref().unwrap_or("unknown");
    let reason = format!(
        "nothing was changed: the row has a value that cannot be read, {problem}. Fix the value with SQL, or remove the endpoint"
    );
    ConfigError::new(format!("destinations.{}", one.name), reason)
}

/// The error of a value that the table has refused names the value.
fn of_value(name: &str, error: EndpointError) -> EndpointError {
    match error {
        EndpointError::Database(error) => match store::refused_value(&error) {
            Some((value, reason)) => {
                ConfigError::new(format!("destinations.{name}.{value}"), reason).into()
            }
            None => EndpointError::Database(error),
        },
        error => error,
    }
}

/// Gives the row what the code declares, except what an operator has set.
fn declare(from: &Endpoint, to: &mut Endpoint) -> Result<(), ConfigError> {
    to.is_unread = false;
    let set_by = to.set_by.clone();
    let may_set = |value: &str| set_by.get(value) != Some(&Hand::Operator);
    to.kind = from.kind;
    to.url.clone_from(&from.url);
    to.topics.clone_from(&from.topics);
    to.tenant_id = from.tenant_id;
    to.description.clone_from(&from.description);
    if !from.enabled && to.enabled {
        to.enabled = false;
        to.disabled_by = from.disabled_by;
        to.disabled_reason.clone_from(&from.disabled_reason);
    }
    if may_set("filter") {
        to.filter.clone_from(&from.filter);
    }
    if may_set("headers") {
        to.headers.clone_from(&from.headers);
    }
    if may_set("auth") {
        to.auth.clone_from(&from.auth);
    }
    if may_set("verification") {
        to.verification = from.verification;
    }
    for option in PolicyOption::of_endpoints().filter(|option| may_set(option.name)) {
        option.copy(&from.policy, &mut to.policy)?;
    }
    Ok(())
}

/// Who has disabled the endpoint, and that nobody but an operator enables what an operator has disabled.
fn settle_enabled(before: &Endpoint, after: &mut Endpoint, by: Hand) -> Result<(), EndpointError> {
    if after.enabled {
        if by != Hand::Operator && before.is_disabled_by_operator() {
            return Err(EndpointError::SetByOperator("enabled".to_owned()));
        }
        after.disabled_by = None;
        after.disabled_reason = None;
    } else if before.enabled && after.disabled_by.is_none() {
        after.disabled_by = Some(by);
    }
    Ok(())
}

/// Sets the problem of each endpoint that the settings of all running relays refuse.
fn report_refusals(
    conn: &mut PgConnection,
    outbox: &OutboxName,
    found: &mut [Endpoint],
) -> Result<(), EndpointError> {
    if found.is_empty() {
        return Ok(());
    }
    let refused = served::refused(conn, outbox)?.into_iter();
    let refused = refused.filter(|one| !one.is_served);
    let why: HashMap<String, String> = refused
        .map(|one| {
            let served::RefusedEndpoint {
                name, relay, why, ..
            } = one;
            let why = format!("no running relay serves the endpoint; {relay} refuses it: {why}");
            (name, why)
        })
        .collect();
    for one in found.iter_mut().filter(|one| one.enabled) {
        let problem = one.problem.take();
        one.problem = problem.or_else(|| why.get(&one.name).cloned());
    }
    Ok(())
}

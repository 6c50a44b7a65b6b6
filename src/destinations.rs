//! Registered destinations: webhooks that an application's own customers register.
//!
//! *Configured* destinations stand in `outbox.toml` or the builder. *Registered* ones are rows of
//! `outbox_destination`, which come, change and go while everything runs.
//! [`Outbox::destinations`] writes them in the application's transaction.
//!
//! **Not finished:** they can be registered, and no relay delivers to them yet.
//!
//! ```no_run
//! use diesel::prelude::*;
//! use diesel_outbox::Outbox;
//! use diesel_outbox::destinations::{DestinationFilter, RegisteredDestination};
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
//! destinations.remove(&mut conn, "acme")?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::time::Duration;

use diesel::PgConnection;
use secrecy::ExposeSecret;

use crate::config::{ConfigError, SigningSecret, parse_secrets};
use crate::name::OutboxName;
use crate::outbox::Outbox;
use crate::store::destinations as store;

pub use crate::registered::RegisteredDestination;
pub use crate::store::destinations::DestinationFilter;

/// Why a registered destination was not written or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DestinationError {
    /// A value cannot be used. Nothing was sent to the database.
    #[error(transparent)]
    Invalid(#[from] ConfigError),
    /// The database refused or failed. The caller's transaction is aborted.
    #[error(transparent)]
    Database(#[from] diesel::result::Error),
}

/// The registered destinations of an outbox: see [the module](self).
///
/// Every method works in the caller's transaction, where one is open: a relay sees the change when it is committed.
#[derive(Debug, Clone, Copy)]
pub struct Destinations<'a> {
    name: &'a OutboxName,
}

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
        Destinations { name: self.name() }
    }
}

impl Destinations<'_> {
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
        let secret = SigningSecret::random();
        store::put(
            conn,
            self.name,
            destination,
            secret.written().expose_secret(),
        )?;
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
        Ok(store::get(conn, self.name, name)?)
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
        Ok(store::list(conn, self.name, filter, limit)?)
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
    /// When the database fails, or somebody has written a secret that is none.
    pub fn secret(
        &self,
        conn: &mut PgConnection,
        name: &str,
    ) -> Result<Option<SigningSecret>, DestinationError> {
        let Some(text) = store::secret(conn, self.name, name)? else {
            return Ok(None);
        };
        let secrets = parse_secrets(&format!("destinations.{name}.secret"), &text)?;
        Ok(secrets.into_iter().next())
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
        let written = secret.written();
        Ok(store::rotate(
            conn,
            self.name,
            name,
            written.expose_secret(),
            keep,
        )?)
    }
}

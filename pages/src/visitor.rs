//! Who sends a request, and what they may do, as the application knows it.

use std::net::{IpAddr, Ipv4Addr};

use uuid::Uuid;

/// Who sends a request, and what they may do.
///
/// ```
/// use diesel_outbox_pages::{Rights, Visitor};
///
/// let peer = "192.0.2.7".parse()?;
/// let ann = Visitor::known("ann", Rights::look().with_act(true)).from_peer(peer);
/// let customer = Visitor::of_tenant(uuid::Uuid::nil(), "bob@acme.example", Rights::all());
/// let stranger = Visitor::unknown(peer);
/// # let _ = (ann, customer, stranger);
/// # Ok::<(), std::net::AddrParseError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Visitor {
    pub(crate) identity: Option<Identity>,
    pub(crate) peer: IpAddr,
}

/// A person whom the application has checked.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    pub(crate) who: String,
    pub(crate) rights: Rights,
    /// The only tenant for whom this person acts; `None`: an operator.
    pub(crate) tenant: Option<Uuid>,
}

impl Visitor {
    /// Nobody has checked who this is: the login of the pages decides. Without a token there is no login, and only an
    /// address of this machine is let in: behind a proxy, this must be the address of the client, not that of the proxy.
    pub fn unknown(peer: IpAddr) -> Self {
        Self {
            identity: None,
            peer: peer.to_canonical(),
        }
    }

    /// An operator whom the application has logged in: the pages have no login and no logout. Forms are accepted under the
    /// host names in `OUTBOX_ADMIN_HOSTS`, localhost and addresses only: an application that knows visitors by their address
    /// or VPN would also know them on a page of another site (DNS rebinding).
    pub fn known(who: impl Into<String>, rights: Rights) -> Self {
        Self::identified(who.into(), rights, None)
    }

    /// A person who acts for this tenant, as the application has checked. The pages of operators refuse such visitors.
    pub fn of_tenant(tenant: Uuid, who: impl Into<String>, rights: Rights) -> Self {
        Self::identified(who.into(), rights, Some(tenant))
    }

    fn identified(who: String, rights: Rights, tenant: Option<Uuid>) -> Self {
        let identity = Identity {
            who,
            rights,
            tenant,
        };
        Self {
            identity: Some(identity),
            peer: Ipv4Addr::UNSPECIFIED.into(),
        }
    }

    /// The address of the client, for the audit log. Defaults to `0.0.0.0` for visitors whom the application knows.
    #[must_use]
    pub fn from_peer(mut self, peer: IpAddr) -> Self {
        self.peer = peer.to_canonical();
        self
    }
}

/// What a visitor may do besides looking.
///
/// ```
/// use diesel_outbox_pages::Rights;
///
/// let support = Rights::look().with_payloads(true);
/// assert_ne!(support, Rights::all());
/// assert_eq!(support.with_act(true).with_secrets(true), Rights::all());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rights {
    /// To change something. Without it there are no forms.
    pub act: bool,
    /// To see payloads, headers and responses. Without it only their shape is shown.
    pub payloads: bool,
    /// To see the signing secret that an act of theirs has made.
    pub secrets: bool,
}

/// The right that a page or an act needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    Look,
    Act,
    Secrets,
}

impl Rights {
    pub(crate) fn meet(self, needs: Needs) -> bool {
        match needs {
            Needs::Look => true,
            Needs::Act => self.act,
            Needs::Secrets => self.act && self.secrets,
        }
    }

    /// To look, without payloads and secrets.
    pub fn look() -> Self {
        Self {
            act: false,
            payloads: false,
            secrets: false,
        }
    }

    /// To do and see everything.
    pub fn all() -> Self {
        Self {
            act: true,
            payloads: true,
            secrets: true,
        }
    }

    /// Whether the visitor may change something.
    #[must_use]
    pub fn with_act(mut self, act: bool) -> Self {
        self.act = act;
        self
    }

    /// Whether the visitor may see payloads, headers and responses.
    #[must_use]
    pub fn with_payloads(mut self, payloads: bool) -> Self {
        self.payloads = payloads;
        self
    }

    /// Whether the visitor may see secrets that an act of theirs has made.
    #[must_use]
    pub fn with_secrets(mut self, secrets: bool) -> Self {
        self.secrets = secrets;
        self
    }
}

//! Who visits the portal: a person whom the application knows, or whoever has opened a link in time.
//!
//! A link and the cookie that it becomes are texts that say until when, for which tenant and with which rights, and a
//! signature. The signature of a link is no signature of a cookie.

use http::StatusCode;
use uuid::Uuid;

use crate::api::Problem;
use crate::key::{Key, hex, random};
use crate::request::Request;
use crate::response::Response;
use crate::visitor::Identity;
use crate::{PagesError, Rights};

/// What links and cookies are signed for.
const LINK: &str = "portal link";
const COOKIE: &str = "portal session";
const FORM: &str = "portal form";

/// A visitor whom the portal has let in.
pub(super) struct Session {
    /// For the audit log.
    pub(super) who: String,
    pub(super) tenant: Uuid,
    pub(super) rights: Rights,
    /// The token that every form of this session must send back.
    pub(super) form_token: String,
}

/// Why a visitor is not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unopened {
    /// There is no cookie, or the visitor is no tenant's.
    Missing,
    Expired,
    /// Not of this key.
    Invalid,
}

impl Unopened {
    /// The refusal of a request for JSON or for events.
    pub(super) fn refusal(self, request: &Request) -> Response {
        let (status, why) = match self {
            Self::Missing if request.visitor.identity.is_some() => {
                (StatusCode::FORBIDDEN, "the portal is for customers")
            }
            Self::Missing => (
                StatusCode::UNAUTHORIZED,
                "this request needs a token: send Authorization: Bearer …",
            ),
            Self::Expired => (StatusCode::UNAUTHORIZED, "the token has expired"),
            Self::Invalid => (StatusCode::UNAUTHORIZED, "the token is not valid"),
        };
        Problem::new(status, why).into()
    }
}

/// What a link or a cookie says.
#[derive(Debug, PartialEq, Eq)]
struct Claim {
    /// In seconds since 1970.
    until: u64,
    tenant: Uuid,
    rights: Rights,
    /// Tells sessions apart; empty in links.
    nonce: String,
}

impl Claim {
    fn text(&self) -> String {
        let Rights {
            act,
            payloads,
            secrets,
        } = self.rights;
        let rights = [(act, 'a'), (payloads, 'p'), (secrets, 's')];
        let rights = rights.into_iter().filter(|(may, _)| *may);
        let rights: String = rights.map(|(_, letter)| letter).collect();
        let Self {
            until,
            tenant,
            nonce,
            ..
        } = self;
        format!("{until}.{}.{rights}.{nonce}", tenant.simple())
    }

    fn read(text: &str) -> Option<Self> {
        let mut parts = text.split('.');
        let (until, tenant) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        let rights = parts.next()?;
        let rights = Rights::look()
            .with_act(rights.contains('a'))
            .with_payloads(rights.contains('p'))
            .with_secrets(rights.contains('s'));
        Some(Self {
            until,
            tenant,
            rights,
            nonce: parts.next()?.to_owned(),
        })
    }

    fn signed(&self, key: &Key, purpose: &str) -> String {
        let text = self.text();
        format!("{text}.{}", key.signature(purpose, &text))
    }

    /// The claim of a signed text, if the key has signed it for this purpose and its time is not over.
    fn verified(key: &Key, purpose: &str, signed: &str, now: u64) -> Result<Self, Unopened> {
        let (text, signature) = signed.rsplit_once('.').ok_or(Unopened::Invalid)?;
        if !key.is_same(signature, &key.signature(purpose, text)) {
            return Err(Unopened::Invalid);
        }
        match Self::read(text) {
            Some(claim) if now < claim.until => Ok(claim),
            Some(_) => Err(Unopened::Expired),
            None => Err(Unopened::Invalid),
        }
    }
}

/// The text of a link.
pub(super) fn link(key: &Key, tenant: Uuid, until: u64, rights: Rights) -> String {
    let nonce = String::new();
    let claim = Claim {
        until,
        tenant,
        rights,
        nonce,
    };
    claim.signed(key, LINK)
}

/// The cookie that a link becomes, and the end of both.
pub(super) fn open(key: &Key, link: &str, now: u64) -> Result<(String, u64), Unopened> {
    let claim = Claim::verified(key, LINK, link, now)?;
    let nonce: Result<[u8; 16], PagesError> = random();
    let nonce = nonce.map_err(|error| {
        log::warn!(event = "portal_failed", error:%; "the portal cannot open a link: {error}");
        Unopened::Invalid
    })?;
    let claim = Claim {
        nonce: hex(&nonce),
        ..claim
    };
    Ok((claim.signed(key, COOKIE), claim.until))
}

impl Session {
    /// Everybody who acts for the tenant.
    pub(super) fn party(&self) -> String {
        format!("tenant {}", self.tenant)
    }

    /// The session of a cookie.
    pub(super) fn of_cookie(key: &Key, cookie: &str, now: u64) -> Result<Self, Unopened> {
        if cookie.is_empty() {
            return Err(Unopened::Missing);
        }
        let claim = Claim::verified(key, COOKIE, cookie, now)?;
        Ok(Self {
            who: "portal link".to_owned(),
            tenant: claim.tenant,
            rights: claim.rights,
            form_token: key.signature(FORM, cookie),
        })
    }

    /// The session of a program with the token of a link.
    pub(super) fn of_token(key: &Key, token: &str, now: u64) -> Result<Self, Unopened> {
        let claim = Claim::verified(key, LINK, token, now)?;
        Ok(Self {
            who: "portal token".to_owned(),
            tenant: claim.tenant,
            rights: claim.rights,
            form_token: key.signature(FORM, token),
        })
    }

    /// A person whom the application has checked. Operators are no tenant's.
    pub(super) fn of_identity(key: &Key, identity: &Identity) -> Result<Self, Unopened> {
        let tenant = identity.tenant.ok_or(Unopened::Missing)?;
        let who = &identity.who;
        Ok(Self {
            who: who.clone(),
            tenant,
            rights: identity.rights,
            form_token: key.signature(FORM, &format!("{tenant} {who}")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TENANT: Uuid = Uuid::from_u128(7);

    /// R60
    #[test]
    fn a_link_holds_until_its_end_and_for_its_key_only() {
        let key = |byte: u8| Key::of_secret(&[byte; 32]).expect("a key");
        let rights = Rights::look().with_payloads(true);
        let token = link(&key(1), TENANT, 100, rights);
        let (cookie, until) = open(&key(1), &token, 99).expect("in time");
        assert_eq!(until, 100);
        let session = Session::of_cookie(&key(1), &cookie, 99).expect("in time");
        assert_eq!((session.tenant, session.rights), (TENANT, rights));
        for (found, why) in [
            (open(&key(1), &token, 100), Unopened::Expired),
            (open(&key(2), &token, 99), Unopened::Invalid),
            (open(&key(1), &cookie, 99), Unopened::Invalid),
            (open(&key(1), "", 99), Unopened::Invalid),
        ] {
            assert_eq!(found, Err(why));
        }
        let of = |cookie: &str, now| Session::of_cookie(&key(1), cookie, now).err();
        assert_eq!(of(&cookie, 100), Some(Unopened::Expired));
        assert_eq!(of(&token, 99), Some(Unopened::Invalid));
        assert_eq!(of("", 99), Some(Unopened::Missing));
        // A longer time, another tenant, another right.
        let other = TENANT.simple().to_string().replace('7', "8");
        for forged in [
            token.replacen("100", "200", 1),
            token.replacen(&TENANT.simple().to_string(), &other, 1),
            token.replacen(".p.", ".aps.", 1),
        ] {
            assert_ne!(forged, token);
            assert_eq!(
                open(&key(1), &forged, 99),
                Err(Unopened::Invalid),
                "{forged}"
            );
        }
    }

    #[test]
    fn the_forms_of_two_sessions_are_not_interchangeable() {
        let key = Key::of_secret(&[1; 32]).expect("a key");
        let token = link(&key, TENANT, 100, Rights::all());
        let session = || {
            let (cookie, _) = open(&key, &token, 1).expect("in time");
            Session::of_cookie(&key, &cookie, 1)
                .expect("in time")
                .form_token
        };
        assert_ne!(session(), session());
    }
}

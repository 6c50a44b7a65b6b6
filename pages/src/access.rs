//! Access control: which host names reach the server, who sends a request, and whether a change comes from
//! a page of this server.

mod guesses;
mod sessions;

use std::net::IpAddr;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use diesel_outbox::program::Admin;
use http::header::{RETRY_AFTER, WWW_AUTHENTICATE};
use http::{Method, StatusCode};
use secrecy::ExposeSecret;

use self::guesses::Guesses;
use self::sessions::Ended;
use crate::key::{Key, hex, random};
use crate::request::Request;
use crate::response::Response;
use crate::text::shortened;
use crate::visitor::Identity;
use crate::{PagesError, Rights};

/// Longest name given at login, in characters.
const LONGEST_NAME: usize = 60;

/// Longest origin in the log, in characters.
const LONGEST_ORIGIN: usize = 100;

/// A visitor whom the pages have let in.
#[derive(Debug)]
pub(crate) struct Guest {
    /// For the audit log: a name given at login or by the application, `token`, or `local`.
    pub(crate) who: String,
    pub(crate) peer: IpAddr,
    pub(crate) rights: Rights,
    /// The token that every form of this guest's pages must send back.
    pub(crate) form_token: String,
    /// Whether there is a session to log out of.
    pub(crate) has_session: bool,
    /// A script with a bearer token: browsers never add that header on their own, so requests cannot be forged.
    pub(crate) is_script: bool,
}

/// The access rules and their state.
pub(crate) struct Access {
    pub(crate) admin: Admin,
    /// The name of the session's cookie; without one, it comes from the key.
    pub(crate) cookie: Option<String>,
    /// Processes with the same key accept each other's sessions and forms. From the token; without a token, random for
    /// each process.
    key: Key,
    ended: Ended,
    guesses: Guesses,
}

impl Access {
    pub(crate) fn new(admin: Admin) -> Result<Self, PagesError> {
        let key = match &admin.token {
            Some(token) => Key::derived(token.expose_secret().as_bytes()),
            None => Key::random()?,
        };
        Ok(Self {
            admin,
            cookie: None,
            key,
            ended: Ended::default(),
            guesses: Guesses::default(),
        })
    }

    /// Signs with this secret from now on.
    pub(crate) fn set_key(&mut self, secret: &[u8]) -> Result<(), PagesError> {
        self.key = Key::of_secret(secret)?;
        Ok(())
    }

    fn cookie(&self) -> String {
        self.cookie
            .clone()
            .unwrap_or_else(|| format!("outbox_admin_{}", self.key.name("cookie")))
    }

    /// Checks that the request names this server by one of its own host names. With DNS rebinding, a foreign name
    /// that resolves to this server would give foreign pages the same origin.
    pub(crate) fn check_host(&self, request: &Request) -> Result<(), Response> {
        let host = request.header("host").unwrap_or_default();
        // The application has checked who reads: a foreign page has no login there.
        let is_known = request.visitor.identity.is_some() && request.method != Method::POST;
        if is_known || self.is_own(host) {
            return Ok(());
        }
        Err(Response::text(
            StatusCode::MISDIRECTED_REQUEST,
            "the host name in the request is not allowed: use the server's IP address or localhost, or add the name to OUTBOX_ADMIN_HOSTS\n",
        ))
    }

    fn is_own(&self, host: &str) -> bool {
        let host = host.to_ascii_lowercase();
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => &host,
        };
        let address = name
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'));
        name == "localhost"
            || address.unwrap_or(name).parse::<IpAddr>().is_ok()
            || self.admin.hosts.iter().any(|host| host == name)
    }

    /// Who sent the request. The error is a refusal; for a browser, a redirect to the login page.
    pub(crate) fn guest(&self, request: &Request) -> Result<Guest, Response> {
        match &request.visitor.identity {
            Some(identity) if identity.tenant.is_some() => Err(forbidden(
                "these pages are for operators, not for tenants\n",
            )),
            Some(identity) => Ok(self.known(identity, request.visitor.peer)),
            None => self.logged_in(request),
        }
    }

    /// A visitor whom the application has logged in.
    pub(crate) fn known(&self, identity: &Identity, peer: IpAddr) -> Guest {
        let Identity {
            who,
            rights,
            tenant,
        } = identity;
        let rights = rights.with_act(rights.act && !self.admin.read_only);
        let session = format!("known:{}:{who}", tenant.unwrap_or_default());
        self.admit(who, peer, rights, &session)
    }

    /// `session`: the forms of two sessions are not interchangeable.
    fn admit(&self, who: &str, peer: IpAddr, rights: Rights, session: &str) -> Guest {
        Guest {
            who: who.to_owned(),
            peer,
            rights,
            form_token: self.key.signature("form", session),
            has_session: false,
            is_script: false,
        }
    }

    /// The rights of everybody who has the token: what the settings allow.
    fn own_rights(&self) -> Rights {
        Rights {
            act: !self.admin.read_only,
            payloads: self.admin.payloads,
            secrets: self.admin.payloads,
        }
    }

    fn logged_in(&self, request: &Request) -> Result<Guest, Response> {
        let peer = request.visitor.peer;
        if self.admin.token.is_none() {
            // The program listens beyond loopback only with a token. An application may pass anybody on.
            if !peer.is_loopback() {
                return Err(forbidden(
                    "set OUTBOX_ADMIN_TOKEN: without a token, these pages are for visitors from this machine\n",
                ));
            }
            return Ok(self.admit("local", peer, self.own_rights(), "local"));
        }
        if request.header("authorization").is_some() {
            return self.bearer(request);
        }
        let session = request.cookie(&self.cookie()).unwrap_or_default();
        match self.session(session) {
            Some((who, _)) => Ok(Guest {
                has_session: true,
                ..self.admit(&who, peer, self.own_rights(), session)
            }),
            None if request.method == Method::POST => Err(Response::text(
                StatusCode::UNAUTHORIZED,
                "the session has ended: log in again\n",
            )),
            None => {
                let mut next = url::form_urlencoded::Serializer::new(String::new());
                next.append_pair("next", &request.target);
                Err(Response::see_other(&format!("/login?{}", next.finish())))
            }
        }
    }

    /// Checks a request to an endpoint for scripts. The error says what is missing and never redirects.
    pub(crate) fn script(&self, request: &Request) -> Result<Guest, Response> {
        let session = request.cookie(&self.cookie()).unwrap_or_default();
        let is_known = request.visitor.identity.is_some() || self.admin.token.is_none();
        if is_known || self.session(session).is_some() {
            return self.guest(request);
        }
        self.bearer(request)
    }

    /// Checks the operators' token.
    pub(crate) fn bearer(&self, request: &Request) -> Result<Guest, Response> {
        let peer = request.visitor.peer;
        self.check_token(peer, request.bearer().unwrap_or_default())?;
        Ok(Guest {
            is_script: true,
            ..self.admit("token", peer, self.own_rights(), "token")
        })
    }

    /// Checks the token in constant time. The right token is always accepted: wrong guesses from the same address
    /// lock no one out.
    fn check_token(&self, peer: IpAddr, given: &str) -> Result<(), Response> {
        let is_right = self
            .admin
            .token
            .as_ref()
            .is_some_and(|token| self.key.is_same(given, token.expose_secret()));
        if is_right {
            return Ok(());
        }
        if given.is_empty() {
            return Err(unauthorized(
                "this request needs a token: send Authorization: Bearer …\n",
            ));
        }
        if let Err(wait) = self.guesses.wrong(peer, Instant::now()) {
            let seconds = wait.as_secs() + 1;
            return Err(Response::text(
                StatusCode::TOO_MANY_REQUESTS,
                format!(
                    "wrong token, and too many wrong tokens from this address: wait {seconds} s\n"
                ),
            )
            .with_header(RETRY_AFTER, &seconds.to_string()));
        }
        log::warn!(target: super::AUDIT, event = "admin_refused", peer:% = peer; "admin page: wrong token from {}", peer);
        Err(unauthorized("wrong token\n"))
    }

    /// Starts a session. Returns the cookie to set.
    pub(crate) fn log_in(&self, request: &Request) -> Result<String, Response> {
        self.check_origin(request)?;
        let form = request.form();
        self.check_token(
            request.visitor.peer,
            form.get("token").unwrap_or_default().trim(),
        )?;
        let name: String = form
            .get("name")
            .unwrap_or("token")
            .chars()
            .take(LONGEST_NAME)
            .collect();
        let nonce: [u8; 16] = random().map_err(|error| {
            Response::text(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"))
        })?;
        let until = unix_seconds() + sessions::LONGEST.as_secs();
        let session = self.signed(until, &name, &hex(&nonce));
        log::info!(target: super::AUDIT, event = "admin_login", who = name, peer:% = request.visitor.peer; "{name:?} logged in to the admin page from {}", request.visitor.peer);
        Ok(self.set_cookie(request, &session, sessions::LONGEST.as_secs()))
    }

    /// A session, as its cookie says it.
    fn signed(&self, until: u64, who: &str, nonce: &str) -> String {
        let unsigned = sessions::unsigned(until, who, nonce);
        let signature = self.key.signature("session", &unsigned);
        format!("{unsigned}.{signature}")
    }

    /// The name and the end of a session that this or another process has begun, and that has not ended.
    fn session(&self, session: &str) -> Option<(String, u64)> {
        let (unsigned, signature) = session.rsplit_once('.')?;
        let is_ours = self
            .key
            .is_same(signature, &self.key.signature("session", unsigned));
        let found = sessions::read(unsigned).filter(|_| is_ours);
        found.filter(|(_, until)| unix_seconds() < *until && !self.ended.has(session))
    }

    /// Ends the session, at this process; others accept the cookie until it expires. Returns the cookie that makes
    /// the browser delete it.
    pub(crate) fn log_out(&self, request: &Request) -> String {
        let session = request.cookie(&self.cookie()).unwrap_or_default();
        if let Some((_, until)) = self.session(session) {
            self.ended.add(session, until, unix_seconds());
        }
        self.set_cookie(request, "", 0)
    }

    fn set_cookie(&self, request: &Request, session: &str, seconds: u64) -> String {
        // If the browser reached a proxy over TLS, it must send the cookie only over TLS.
        let is_tls = request
            .header("origin")
            .is_some_and(|origin| origin.starts_with("https:"));
        let secure = if is_tls { "; Secure" } else { "" };
        let name = self.cookie();
        let path = match self.admin.base.as_str() {
            "" => "/",
            base => base,
        };
        format!(
            "{name}={session}; Path={path}; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"
        )
    }

    /// Checks that the guest may change something and that this change comes from a page of this server, with the token
    /// of its forms.
    pub(crate) fn check_change(
        &self,
        request: &Request,
        guest: &Guest,
        form_token: &str,
    ) -> Result<(), Response> {
        if !guest.rights.act {
            return Err(forbidden(match self.admin.read_only {
                true => "changes are disabled: OUTBOX_ADMIN_READ_ONLY is set\n",
                false => "you may look, but change nothing\n",
            }));
        }
        if !guest.is_script {
            self.check_origin(request)?;
            if !self.key.is_same(form_token, &guest.form_token) {
                return Err(forbidden(
                    "this form has expired or belongs to another session: reload the page and try again\n",
                ));
            }
        }
        Ok(())
    }

    /// Checks that a form comes from this server. Browsers send its origin; a form without an origin is refused.
    pub(crate) fn check_origin(&self, request: &Request) -> Result<(), Response> {
        let is_same_site = request
            .header("sec-fetch-site")
            .is_none_or(|site| site == "same-origin");
        let host = request.header("host").unwrap_or_default();
        let is_own = request.header("origin").is_some_and(|origin| {
            let from = origin.split_once("://").map_or("", |(_, from)| from);
            // A proxy may have replaced Host with its own name for this server.
            from.eq_ignore_ascii_case(host)
                || self
                    .admin
                    .hosts
                    .iter()
                    .any(|host| from.eq_ignore_ascii_case(host))
        });
        if is_same_site && is_own {
            return Ok(());
        }
        // Anybody can send such forms without a token.
        if self
            .guesses
            .wrong(request.visitor.peer, Instant::now())
            .is_ok()
        {
            let origin = request.header("origin").unwrap_or("none");
            let origin = shortened(origin, LONGEST_ORIGIN);
            log::warn!(target: super::AUDIT, event = "admin_cross_site", peer:% = request.visitor.peer, origin = origin.as_str(); "admin page: refused a form from another site, sent by {}", request.visitor.peer);
        }
        Err(forbidden(
            "forms from other sites are refused: behind a proxy, add the public name of this page to OUTBOX_ADMIN_HOSTS\n",
        ))
    }
}

fn unauthorized(reason: &str) -> Response {
    Response::text(StatusCode::UNAUTHORIZED, reason).with_header(WWW_AUTHENTICATE, "Bearer")
}

fn forbidden(reason: &str) -> Response {
    Response::text(StatusCode::FORBIDDEN, reason)
}

pub(crate) fn unix_seconds() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use diesel_outbox::config::Config;
    use diesel_outbox::program;

    use super::*;

    fn access(token: &str) -> Access {
        let mut config = Config::default();
        config.set("OUTBOX_ADMIN_TOKEN", token).expect("a token");
        Access::new(program::admin(&config).clone()).expect("random bytes")
    }

    /// R60
    #[test]
    fn a_session_holds_until_its_end_and_for_its_token_only() {
        let (own, other) = (access(&"a".repeat(32)), access(&"b".repeat(32)));
        let until = unix_seconds() + 60;
        let session = own.signed(until, "ann", "00ff");
        assert_eq!(own.session(&session), Some(("ann".to_owned(), until)));
        assert_eq!(other.session(&session), None);
        assert_eq!(
            own.session(&own.signed(unix_seconds(), "ann", "00ff")),
            None
        );
        let unsigned = sessions::unsigned(until, "ann", "00ff");
        for forged in [
            session.replacen(&until.to_string(), &(until + 1).to_string(), 1),
            session.replacen(&hex(b"ann"), &hex(b"bob"), 1),
            session.replacen("00ff", "00fe", 1),
            unsigned.clone(),
            format!("{unsigned}.{}", own.key.signature("form", &unsigned)),
        ] {
            assert_ne!(forged, session);
            assert_eq!(own.session(&forged), None, "{forged}");
        }
    }
}

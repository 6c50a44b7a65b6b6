//! The portal: pages for the customers of an application. Each visitor acts for one tenant, and sees nothing else.
//!
//! Each page is a row of [`ROUTES`], with the parameters that it reads and the right that it needs.

mod api;
mod conditions;
mod deliveries;
mod endpoints;
mod feeds;
mod own;
mod session;
mod words;

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use diesel_outbox::admin;
use diesel_outbox::config::Config;
use diesel_outbox::endpoints::EndpointError;
use http::header::{ALLOW, SET_COOKIE};
use http::{Method, StatusCode};
use maud::{Markup, html};
use serde_json::Value;
use uuid::Uuid;

pub use self::words::Language;

use self::conditions::Word;
use self::own::Own;
use self::session::{Session, Unopened};
use self::words::Words;
use crate::access::unix_seconds;
use crate::base;
use crate::database::{Connections, Database};
use crate::feeds::Waiters;
use crate::key::Key;
use crate::pages;
use crate::pages::layout::{Head, dialog, document, mark};
use crate::request::{Form, Request};
use crate::response::Response;
use crate::visitor::Needs;
use crate::{Pages, PagesError, Rights, Visitor};

/// Connections for reads, and as many for changes. One tenant uses at most half of either: its slow searches delay no other.
const CONNECTIONS: usize = 4;
/// Endpoints per page.
const ENDPOINTS: usize = 100;
const STYLE: &str = include_str!("pages/style.css");

/// The pages for the customers of an application: endpoints, deliveries, send again, recover, secrets, examples.
///
/// A visitor comes from the application's own login ([`Visitor::of_tenant`]), or opens a [link](Self::link) that the
/// application made ([`Visitor::unknown`]).
///
/// ```no_run
/// use diesel_outbox::config;
/// use diesel_outbox_pages::{Language, Pages, Rights, Visitor};
/// use std::time::Duration;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let tenant = uuid::Uuid::nil();
/// let config = config::from_env()?;
/// let portal = Pages::portal(&config, config.database_url()?)?
///     .key(std::env::var("PORTAL_KEY")?)?
///     .base("/webhooks")
///     .name("Acme Shop")
///     .logo("image/svg+xml", "<svg/>")
///     .style(":root { --accent: #0a6e4f; }")
///     .language(Language::German)
///     .topic("order.paid", "An order was paid.", serde_json::json!({ "order_id": 1 }));
/// let hour = Duration::from_secs(3600);
/// let for_support = portal.link_with(tenant, hour, Rights::look());
/// let link = portal.link(tenant, hour);
/// let request = http::Request::get(&link).header("host", "shop.example");
/// let visitor = Visitor::unknown([127, 0, 0, 1].into());
/// assert_ne!(link, for_support);
/// let response = portal.respond(request.body(Vec::new())?, visitor);
/// assert_eq!(response.status(), 303);
/// # Ok(())
/// # }
/// ```
pub struct Portal {
    config: Config,
    reads: Database,
    /// For changes, which can take longer.
    changes: Database,
    /// For readers of feeds.
    feeds: Arc<Database>,
    waiters: Waiters,
    key: Key,
    base: String,
    name: Option<String>,
    logo: Option<(&'static str, Vec<u8>)>,
    style: String,
    language: Option<Language>,
    topics: Vec<Topic>,
    /// Whether the topics are to be declared in the outbox, and are not yet.
    declares: AtomicBool,
}

/// A topic that customers can choose.
struct Topic {
    topic: String,
    description: String,
    /// A payload; null: none.
    example: Value,
}

impl Pages {
    /// The portal of the outbox in these settings. `connections` are as those of [`operators`](Self::operators); the portal
    /// uses at most twelve at the same time. The first request connects to the database.
    ///
    /// ```no_run
    /// use diesel_outbox_pages::Pages;
    ///
    /// let config = diesel_outbox::config::from_env()?;
    /// let portal = Pages::portal(&config, config.database_url()?)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The system has no random bytes.
    pub fn portal(
        config: &Config,
        connections: impl Into<Connections>,
    ) -> Result<Portal, PagesError> {
        let source = &connections.into();
        let database = |purpose| Database::several(source, &config.table, purpose, CONNECTIONS);
        let feeds = Arc::new(database("portal feeds"));
        Ok(Portal {
            waiters: crate::waiters(config, &feeds),
            feeds,
            reads: database("portal"),
            changes: database("portal changes"),
            config: config.clone(),
            key: Key::random()?,
            base: String::new(),
            name: None,
            logo: None,
            style: STYLE.to_owned(),
            language: None,
            topics: Vec::new(),
            declares: AtomicBool::new(false),
        })
    }
}

impl Portal {
    /// The secret that signs links, sessions and forms, of at least 32 bytes: processes with the same key accept each
    /// other's. Defaults to a random key of this process.
    ///
    /// # Errors
    ///
    /// The key is too short.
    pub fn key(mut self, key: impl AsRef<[u8]>) -> Result<Self, PagesError> {
        self.key = Key::of_secret(key.as_ref())?;
        Ok(self)
    }

    /// The path below which the application serves the portal, such as `/webhooks`. Defaults to the root.
    #[must_use]
    pub fn base(mut self, path: impl Into<String>) -> Self {
        let path: String = path.into();
        path.trim_end_matches('/').clone_into(&mut self.base);
        self
    }

    /// The name of the application, beside the logo.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The logo: its media type, such as `image/svg+xml`, and its content.
    #[must_use]
    pub fn logo(mut self, media_type: &'static str, image: impl Into<Vec<u8>>) -> Self {
        self.logo = Some((media_type, image.into()));
        self
    }

    /// CSS after that of the portal. Colours are variables: `:root { --accent: #0a6e4f; }`.
    #[must_use]
    pub fn style(mut self, css: &str) -> Self {
        self.style.push_str(css);
        self
    }

    /// The language. Defaults to that of the visitor's browser.
    #[must_use]
    pub fn language(mut self, language: Language) -> Self {
        self.language = Some(language);
        self
    }

    /// Adds a topic that customers can choose, with its description and an example of a payload. Without any topic,
    /// endpoints get all events of their tenant.
    #[must_use]
    pub fn topic(
        mut self,
        topic: impl Into<String>,
        description: impl Into<String>,
        example: Value,
    ) -> Self {
        self.topics.push(Topic {
            topic: topic.into(),
            description: description.into(),
            example,
        });
        self
    }

    /// Adds the topics of a catalogue. Of several versions of a topic, the newest is described.
    #[cfg(feature = "schemars")]
    #[must_use]
    pub fn topics(mut self, catalogue: &diesel_outbox::catalogue::Catalogue) -> Self {
        for event in &catalogue.events {
            self.topics.retain(|one| one.topic != event.topic);
            self = self.topic(&event.topic, &event.description, event.example.clone());
        }
        self
    }

    /// Declares the topics of the portal's list as those of the application: a message of another topic that nobody wants
    /// waits from then on, instead of ending without a subscriber
    /// ([`declare_topics`](diesel_outbox::admin::declare_topics)). The first request declares them.
    ///
    /// ```no_run
    /// # use diesel_outbox_pages::Portal;
    /// # fn declaring(portal: Portal) -> Portal {
    /// portal
    ///     .topic("order.paid", "An order was paid.", serde_json::json!({ "order_id": 1 }))
    ///     .declares_topics()
    /// # }
    /// ```
    #[must_use]
    pub fn declares_topics(self) -> Self {
        self.declares.store(true, Ordering::Relaxed);
        self
    }

    /// Declares the topics, once. If that fails, the next request tries again.
    fn declare_topics(&self) {
        if !self.declares.swap(false, Ordering::Relaxed) {
            return;
        }
        let topics: Vec<String> = self.topics.iter().map(|one| one.topic.clone()).collect();
        let declared =
            (self.changes).run(|conn, outbox| admin::declare_topics(conn, outbox, topics));
        if let Err(error) = declared {
            self.declares.store(true, Ordering::Relaxed);
            log::error!(event = "topics_not_declared", error:% = format!("{error:#}"); "could not declare the topics of the portal: {error:#}; the next request tries again");
        }
    }

    /// A path that opens the portal for this tenant, for this time, with all rights. Whoever has the link has the rights,
    /// so give it to the tenant only.
    pub fn link(&self, tenant: Uuid, valid_for: Duration) -> String {
        self.link_with(tenant, valid_for, Rights::all())
    }

    /// A [link](Self::link) with these rights.
    pub fn link_with(&self, tenant: Uuid, valid_for: Duration, rights: Rights) -> String {
        let token = self.token(tenant, valid_for, rights);
        format!("{}/open?token={token}", self.base)
    }

    /// A token for the programs of this tenant, which send it as `Authorization: Bearer` to `api/v1`. It is that of a
    /// [link](Self::link_with).
    ///
    /// ```no_run
    /// # use diesel_outbox_pages::{Portal, Rights};
    /// # use std::time::Duration;
    /// # fn token(portal: Portal, tenant: uuid::Uuid) -> String {
    /// let year = Duration::from_secs(365 * 24 * 3600);
    /// portal.token(tenant, year, Rights::all())
    /// # }
    /// ```
    pub fn token(&self, tenant: Uuid, valid_for: Duration, rights: Rights) -> String {
        let until = unix_seconds().saturating_add(valid_for.as_secs());
        session::link(&self.key, tenant, until, rights)
    }

    /// The response to a request of this visitor. May take as long as the database, as the endpoint that a customer
    /// tests, or as a reader of a feed waits for events (`wait=20s`); at most `OUTBOX_FEED_WAITERS` wait.
    pub fn respond(
        &self,
        request: http::Request<Vec<u8>>,
        visitor: Visitor,
    ) -> http::Response<Vec<u8>> {
        let path = request.uri().path().to_owned();
        self.declare_topics();
        let response = match Request::new(request, visitor, &self.base) {
            Ok(request) => match crate::feed_of(&request) {
                Some(feed) => self.events(request, &feed),
                None => self.answer(&request),
            },
            Err(refused) => crate::api::refused(&path, refused),
        };
        let is_page = response.is_page();
        let mut response = response.into();
        base::add(&self.base, &mut response, is_page);
        response
    }

    fn answer(&self, request: &Request) -> Response {
        let accepted = request.header("accept-language").unwrap_or_default();
        let language = self.language.unwrap_or(Language::accepted(accepted));
        let words = language.words();
        let is_read = matches!(request.method, Method::GET | Method::HEAD);
        match (request.path.as_str(), &self.logo) {
            ("/assets/style.css", _) if is_read => {
                return Response::asset("text/css; charset=utf-8", self.style.as_bytes());
            }
            ("/assets/logo", Some((kind, image))) if is_read => {
                return Response::asset(kind, image.as_slice());
            }
            ("/assets/icon.svg", _) if is_read => return pages::icon(),
            ("/open", _) if is_read => return self.open(request, words),
            _ if let Some(path) = crate::api::path(request) => {
                return api::answer(self, request, path);
            }
            _ => {}
        }
        let session = match self.session(request) {
            Ok(session) => session,
            Err(why) => return self.unopened(words, why),
        };
        let kind = match &request.method {
            _ if is_read => Kind::Page,
            &Method::POST => Kind::Form,
            _ => {
                let why = "only GET, HEAD and POST are supported\n";
                let refused = Response::text(StatusCode::METHOD_NOT_ALLOWED, why);
                return refused.with_header(ALLOW, "GET, HEAD, POST");
            }
        };
        let mut routes = ROUTES.iter();
        let route = routes.find(|route| route.path == request.path && route.kind == kind);
        let route = route.unwrap_or(&NOWHERE);
        let form = request.form();
        let asked = Asked {
            portal: self,
            session: &session,
            words,
            route,
            request,
            form: match kind {
                Kind::Page => &request.query,
                Kind::Form => &form,
            },
        };
        let answered = asked.check().and_then(|()| (route.answer)(&asked));
        answered.unwrap_or_else(|refusal| asked.refused(&refusal))
    }

    /// The session of the visitor: from the application's login, from a bearer token, or from a link that the visitor
    /// has opened.
    fn session(&self, request: &Request) -> Result<Session, Unopened> {
        if let Some(identity) = &request.visitor.identity {
            return Session::of_identity(&self.key, identity);
        }
        if let Some(token) = request.bearer() {
            return Session::of_token(&self.key, token, unix_seconds());
        }
        let cookie = request.cookie(&self.cookie()).unwrap_or_default();
        Session::of_cookie(&self.key, cookie, unix_seconds())
    }

    fn cookie(&self) -> String {
        format!("outbox_portal_{}", self.key.name("cookie"))
    }

    /// Opens a link: its rights move into a cookie, so that no address has them.
    fn open(&self, request: &Request, words: &Words) -> Response {
        let token = request.query.get("token").unwrap_or_default();
        let now = unix_seconds();
        let (cookie, until) = match session::open(&self.key, token, now) {
            Ok(opened) => opened,
            Err(why) => return self.unopened(words, why),
        };
        let is_tls = request.header("x-forwarded-proto") == Some("https");
        let secure = if is_tls { "; Secure" } else { "" };
        let (name, seconds) = (self.cookie(), until.saturating_sub(now));
        let path = if self.base.is_empty() {
            "/"
        } else {
            &self.base
        };
        // Strict would not send the cookie after a click in a mail.
        let cookie = format!(
            "{name}={cookie}; Path={path}; Max-Age={seconds}; HttpOnly; SameSite=Lax{secure}"
        );
        Response::see_other("/").with_header(SET_COOKIE, &cookie)
    }

    fn unopened(&self, words: &Words, why: Unopened) -> Response {
        let (title, hint) = match why {
            Unopened::Missing => (words.link_needed, words.link_needed_hint),
            Unopened::Expired => (words.link_expired, words.link_hint),
            Unopened::Invalid => (words.link_invalid, words.link_hint),
        };
        let content = html! { h1 { (title) } p { (hint) } };
        self.document(StatusCode::FORBIDDEN, words, title, None, &content)
    }

    /// A page. `inside`: the path of a page for those who are let in, and what stands above its content.
    fn document(
        &self,
        status: StatusCode,
        words: &Words,
        title: &str,
        inside: Option<(&str, &Markup)>,
        content: &Markup,
    ) -> Response {
        let name = self.name.as_deref().unwrap_or(words.title);
        let body = html! {
            a.skip href="#main" { (words.skip_to_content) }
            header.top {
                div.bar {
                    p.brand {
                        a href="/" {
                            @if self.logo.is_some() { img.logo src="/assets/logo" alt="" height="28"; } @else { (mark()) }
                            span { (name) }
                        }
                    }
                    @if let Some((path, _)) = inside {
                        nav aria-label=(words.title) {
                            ul {
                                @for (page, name) in [("/", words.endpoints), ("/deliveries", words.deliveries)] {
                                    li { a href=(page) aria-current=[(page == path).then_some("page")] { (name) } }
                                }
                            }
                        }
                    }
                }
            }
            @if let Some((_, above)) = inside { (above) }
            main id="main" tabindex="-1" { (content) }
        };
        let head = Head {
            language: words.code,
            title: &format!("{title} – {name}"),
            script: None,
        };
        document(status, &head, &body)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Page,
    Form,
}

/// One page, or one act.
struct Route {
    kind: Kind,
    path: &'static str,
    needs: Needs,
    /// The parameters that it reads; it can read no others.
    takes: &'static [&'static str],
    answer: fn(&Asked<'_>) -> Result<Response, Refusal>,
}

type Answer = fn(&Asked<'_>) -> Result<Response, Refusal>;

const fn page(path: &'static str, takes: &'static [&'static str], answer: Answer) -> Route {
    Route {
        kind: Kind::Page,
        path,
        needs: Needs::Look,
        takes,
        answer,
    }
}

const fn act(path: &'static str, takes: &'static [&'static str], answer: Answer) -> Route {
    Route {
        kind: Kind::Form,
        ..page(path, takes, answer).needs(Needs::Act)
    }
}

impl Route {
    const fn needs(self, needs: Needs) -> Self {
        Self { needs, ..self }
    }
}

/// The fields of the form of an endpoint. The form of a new one has all but the first.
const FIELDS: &[&str] = &[
    "name",
    "kind",
    "url",
    "description",
    "topic",
    "field",
    "operator",
    "value",
    "filter",
    "shown",
    "more",
];

/// All pages and acts.
const ROUTES: [Route; 20] = [
    page("/", &["after", "done"], endpoints::list),
    page("/endpoint", &["name", "done", "count"], endpoints::show),
    page(
        "/deliveries",
        &["name", "topic", "state", "since", "until", "after"],
        deliveries::list,
    ),
    page("/delivery", &["name", "id"], deliveries::show),
    page("/endpoints/new", &[], endpoints::new).needs(Needs::Act),
    page("/endpoint/edit", &["name"], endpoints::edit).needs(Needs::Act),
    act("/endpoints/add", FIELDS.split_at(1).1, endpoints::add),
    act("/endpoint/change", FIELDS, endpoints::change),
    act("/endpoint/verify", &["name"], endpoints::verify),
    act("/endpoint/rotate", &["name"], endpoints::rotate).needs(Needs::Secrets),
    act("/feed/token", &["name"], feeds::token).needs(Needs::Secrets),
    act("/endpoint/enable", &["name"], endpoints::enable),
    act("/endpoint/disable", &["name"], endpoints::disable),
    act(
        "/endpoint/pause",
        &["name", "for", "reason"],
        endpoints::pause,
    ),
    act("/endpoint/resume", &["name"], endpoints::resume),
    act("/endpoint/retry", &["name"], endpoints::retry),
    act("/endpoint/remove", &["name", "sure"], endpoints::remove),
    act("/endpoint/test", &["name", "topic"], endpoints::test),
    act(
        "/endpoint/recover",
        &["name", "since", "missing"],
        endpoints::recover,
    ),
    act("/delivery/again", &["name", "id"], deliveries::again),
];

/// For paths that no route has.
const NOWHERE: Route = page("", &[], |_| Err(Refusal::NotFound));

/// The routes as method, path and parameters, for tests that try all of them.
#[doc(hidden)]
pub fn portal_routes() -> impl Iterator<Item = (Method, &'static str, &'static [&'static str])> {
    ROUTES.iter().map(|route| {
        let method = match route.kind {
            Kind::Page => Method::GET,
            Kind::Form => Method::POST,
        };
        (method, route.path, route.takes)
    })
}

/// Why a request is refused.
enum Refusal {
    /// There is no such thing, or it belongs to another tenant: nobody can tell which.
    NotFound,
    NotAllowed,
    FormExpired,
    /// What the visitor must do, in the words of any language.
    Invalid(Word),
    /// The same of a field of the form or the body.
    Wrong(&'static str, Word),
    /// The same of a condition of the filter, by its number.
    Condition(usize, Word),
    /// A form would replace another filter than it has shown.
    FilterChanged,
    /// A value that cannot be used, or a limit.
    Error(EndpointError),
    /// The budget of the tenant is spent.
    TooOften,
    /// The database failed. Only the log says why.
    Unavailable(anyhow::Error),
}

impl Refusal {
    /// The status, and what to do. Nothing that only operators may know. `path`: for the log.
    fn words(&self, words: &Words, path: &str) -> (StatusCode, Cow<'static, str>) {
        const INVALID: StatusCode = StatusCode::UNPROCESSABLE_ENTITY;
        match self {
            Self::NotFound => (StatusCode::NOT_FOUND, words.not_found_hint.into()),
            Self::NotAllowed => (StatusCode::FORBIDDEN, words.not_allowed.into()),
            Self::FormExpired => (StatusCode::FORBIDDEN, words.form_expired.into()),
            Self::Invalid(hint) | Self::Wrong(_, hint) => (INVALID, hint(words).into()),
            Self::Error(EndpointError::TooMany(_)) => (INVALID, words.too_many.into()),
            Self::FilterChanged => (StatusCode::CONFLICT, words.filter_changed.into()),
            Self::Error(EndpointError::SetByOperator(_)) => {
                (StatusCode::CONFLICT, words.set_by_us.into())
            }
            Self::Error(EndpointError::Refused(_)) => (INVALID, words.url_refused.into()),
            Self::Error(EndpointError::PayloadNotKept { .. }) => (INVALID, words.not_kept.into()),
            Self::Error(EndpointError::Invalid(error)) if error.key().ends_with(".url") => {
                (INVALID, words.invalid_url.into())
            }
            Self::Error(error @ EndpointError::NoTables(_)) => {
                log::warn!(event = "portal_failed", path = path, error:% = error; "the portal cannot answer {path}: {error}");
                (StatusCode::NOT_IMPLEMENTED, words.not_set_up.into())
            }
            Self::Condition(..) | Self::Error(_) => (INVALID, words.invalid_value.into()),
            Self::TooOften => (StatusCode::TOO_MANY_REQUESTS, words.too_often.into()),
            Self::Unavailable(error) => {
                log::warn!(event = "portal_failed", path = path, error:% = format!("{error:#}"); "the portal cannot answer {path}: {error:#}");
                (
                    StatusCode::SERVICE_UNAVAILABLE,
                    words.unavailable_hint.into(),
                )
            }
        }
    }
}

/// The page of an endpoint.
fn endpoint_page(name: &str) -> String {
    pages::link("/endpoint", &[("name", name)])
}

/// A sentence whose `{}` is this time.
fn with_time(sentence: &str, rfc3339: &str) -> Markup {
    let (before, after) = sentence.split_once("{}").unwrap_or((sentence, ""));
    html! { (before) (pages::words::time(rfc3339)) (after) }
}

/// A request of a visitor to a route.
struct Asked<'a> {
    portal: &'a Portal,
    session: &'a Session,
    words: &'static Words,
    route: &'static Route,
    request: &'a Request,
    form: &'a Form,
}

impl Session {
    /// Checks that a page of this session has sent the request, with the token of its forms.
    fn check_form(&self, portal: &Portal, request: &Request, given: &str) -> Result<(), Refusal> {
        let site = request.header("sec-fetch-site");
        let is_cross_site = site.is_some_and(|site| site != "same-origin");
        match portal.key.is_same(given, &self.form_token) && !is_cross_site {
            true => Ok(()),
            false => Err(Refusal::FormExpired),
        }
    }
}

impl Asked<'_> {
    fn own(&self) -> Own<'_> {
        Own::of(self.portal, self.session, None)
    }

    fn may(&self) -> Rights {
        self.session.rights
    }

    fn shows_responses(&self) -> bool {
        self.own().shows_responses()
    }

    /// Checks the visitor's right, and that a form comes from a page of the visitor's.
    fn check(&self) -> Result<(), Refusal> {
        if !self.may().meet(self.route.needs) {
            return Err(Refusal::NotAllowed);
        }
        let given = self.form.get("form_token").unwrap_or_default();
        match self.route.kind {
            Kind::Page => Ok(()),
            Kind::Form => self.session.check_form(self.portal, self.request, given),
        }
    }

    /// The value of a parameter; empty: none was given.
    fn get(&self, name: &str) -> &str {
        self.given(name).unwrap_or_default()
    }

    fn given(&self, name: &str) -> Option<&str> {
        let is_declared = self.route.takes.contains(&name);
        debug_assert!(is_declared, "{} does not take {name}", self.route.path);
        self.form.get(name).map(str::trim).filter(|_| is_declared)
    }

    fn all<'b>(&'b self, name: &'b str) -> impl Iterator<Item = &'b str> {
        debug_assert!(self.route.takes.contains(&name), "{name} is not declared");
        self.form.all(name)
    }

    /// The message id.
    fn id(&self) -> Result<Uuid, Refusal> {
        self.get("id").parse().map_err(|_| Refusal::NotFound)
    }

    /// The hidden field that every form sends back.
    fn token(&self) -> Markup {
        html! { input type="hidden" name="form_token" value=(self.session.form_token); }
    }

    fn page(&self, status: StatusCode, title: &str, content: &Markup) -> Response {
        let words = self.words;
        let above = html! {
            @if !self.may().act { p.strip { (words.read_only) } }
            @if let Some(notice) = self.notice() { p.notice role="status" { (notice) } }
        };
        let inside = (self.request.path.as_str(), &above);
        (self.portal).document(status, words, title, Some(inside), content)
    }

    /// A page with only one section.
    fn dialog(&self, status: StatusCode, title: &str, content: &Markup) -> Response {
        self.page(status, title, &dialog(title, content))
    }

    /// What the change has done that redirected to this page. Only known values of the address give a notice.
    fn notice(&self) -> Option<String> {
        let words = self.words;
        let count: Option<u64> = (self.form.get("count")).and_then(|count| count.parse().ok());
        Some(match self.form.get("done")? {
            "added" => words.done_added.to_owned(),
            "changed" => words.done_changed.to_owned(),
            "enabled" => words.done_enabled.to_owned(),
            "disabled" => self.own().while_disabled(words),
            "paused" => words.done_paused.to_owned(),
            "resumed" => words.done_resumed.to_owned(),
            "removed" => words.done_removed.to_owned(),
            "again" => words.done_again.to_owned(),
            "verified" => words.done_verified.to_owned(),
            "recovered" => (words.done_recovered).replace("{}", &words.number(count?)),
            "retried" => (words.done_retried).replace("{}", &words.number(count?)),
            "recovering" => (words.done_recovering).replace("{}", &words.number(count?)),
            _ => return None,
        })
    }

    fn refused(&self, refusal: &Refusal) -> Response {
        let words = self.words;
        let (status, hint) = refusal.words(words, &self.request.path);
        let title = match status {
            StatusCode::NOT_FOUND => words.not_found,
            StatusCode::SERVICE_UNAVAILABLE | StatusCode::NOT_IMPLEMENTED => words.unavailable,
            _ => words.invalid_request,
        };
        let content = html! {
            h1 { (title) }
            p.refused role="alert" { (hint) }
            p { a href="/" { (words.back) } }
        };
        self.page(status, title, &content)
    }
}

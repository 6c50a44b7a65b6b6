//! GET of pages of a feed: the client of a consumer, which has no destination, no settings and no relay.

use std::time::{Duration, SystemTime};

use ::http::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use secrecy::{ExposeSecret, SecretString};
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{ConnectProxyConnector, Connector, TcpConnector};
use ureq::{Agent, Error, Proxy, ProxyProtocol};
use url::Url;

use super::USER_AGENT;
use super::retry_after::retry_after;
use super::tls::TlsSettings;
use crate::config::{Config, ConfigError, Destination, Roots};

/// The most bytes of a page.
pub(crate) const MOST_PAGE_BYTES: u64 = 64 * 1024 * 1024;
/// The most time for a connection to the server.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// Older idle connections are not used again: servers close them.
const IDLE_AGE: Duration = Duration::from_secs(5);

/// A client of one server, for any number of threads.
#[derive(Debug, Clone)]
pub(crate) struct PageClient {
    agent: Agent,
    authorization: HeaderValue,
}

/// A response with any status.
#[derive(Debug)]
pub(crate) struct PageAnswer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
    /// How long the server asks to wait.
    pub(crate) retry_after: Option<Duration>,
}

/// Why there is no whole response.
#[derive(Debug)]
pub(crate) enum PageLost {
    TooLarge,
    /// No connection, no response in time, or a cut one: the next try may have it.
    Failed(String),
}

impl PageClient {
    /// `roots`: what TLS trusts. `proxy`: a URL of `http`.
    pub(crate) fn new(
        url: &Url,
        token: &SecretString,
        roots: Roots,
        proxy: Option<&SecretString>,
    ) -> Result<Self, ConfigError> {
        let proxy = proxy.map(|proxy| match Proxy::new(proxy.expose_secret()) {
            Ok(proxy) if proxy.protocol() == ProxyProtocol::Http => Ok(proxy),
            _ => Err(ConfigError::new(
                "proxy",
                "is no URL of http, such as http://proxy:3128",
            )),
        });
        let proxy = proxy.transpose()?;
        let bearer = format!("Bearer {}", token.expose_secret());
        let mut authorization = HeaderValue::from_str(&bearer)
            .map_err(|_| ConfigError::new("token", "has characters that no header can hold"))?;
        authorization.set_sensitive(true);
        // The connector is that of destinations.
        let mut server = Destination::new("feed", url.as_str())
            .map_err(|error| ConfigError::new("url", error.reason()))?;
        server.tls.roots = Some(roots);
        let tls = (TlsSettings::default().of(&server, &Config::default()))
            .map_err(|error| ConfigError::new("url", error.reason()))?;
        // A redirect is an answer: the token is for this server.
        let config = Agent::config_builder()
            .timeout_connect(Some(CONNECT_WITHIN))
            .max_redirects(0)
            .max_redirects_will_error(false)
            .http_status_as_error(false)
            .proxy(proxy)
            .max_idle_age(IDLE_AGE)
            .user_agent(USER_AGENT)
            .build();
        let tcp = ConnectProxyConnector::default().chain(TcpConnector::default());
        let connector = tcp.chain(tls);
        let agent = Agent::with_parts(config, connector, DefaultResolver::default());
        Ok(Self {
            agent,
            authorization,
        })
    }

    /// Gets this page, head and body, within this time.
    pub(crate) fn get(&self, page: &Url, within: Duration) -> Result<PageAnswer, PageLost> {
        let lost = |error: Error| match error {
            Error::BodyExceedsLimit(_) => PageLost::TooLarge,
            Error::Timeout(_) => {
                let within = humantime::format_duration(within);
                PageLost::Failed(format!("no whole response within {within}"))
            }
            Error::Io(error) => PageLost::Failed(error.to_string()),
            Error::Other(error) => PageLost::Failed(error.to_string()),
            other => PageLost::Failed(other.to_string()),
        };
        let request = self.agent.get(page.as_str());
        let request = request
            .header(AUTHORIZATION, &self.authorization)
            .config()
            .timeout_global(Some(within))
            .build();
        let (parts, body) = request.call().map_err(lost)?.into_parts();
        let body = body.into_with_config().limit(MOST_PAGE_BYTES);
        Ok(PageAnswer {
            status: parts.status.as_u16(),
            retry_after: retry_after(&parts.headers, SystemTime::now()),
            headers: parts.headers,
            body: body.read_to_vec().map_err(lost)?,
        })
    }
}

//! The bulkheads of a relay, from its settings and dispatchers.

use std::sync::Arc;

use crossbeam_channel::Sender;

use super::members::most_threads;
use crate::config::{Config, DeliveryPolicy, RequestBatch};
use crate::dispatch::Dispatcher;
use crate::engine::send::bulkhead::{Bulkhead, REST, SendsTo};
use crate::engine::send::gate::Gate;
use crate::engine::send::job::Job;
use crate::engine::send::limits::Limits;
use crate::handlers::HandlerGroup;
use crate::http::EndpointClients;

/// The name of the bulkhead of all endpoints, in metrics and health. No destination can have this name.
const ENDPOINTS: &str = "endpoints";

/// The dispatchers of all destinations.
pub(crate) struct Dispatchers {
    /// For the destinations with a URL, in the order of the settings.
    pub(crate) urls: Vec<Arc<dyn Dispatcher>>,
    /// For the destinations inside the process, in the order of the settings.
    pub(crate) groups: Vec<Arc<HandlerGroup>>,
    /// The application's own dispatcher, for messages that no other destination serves.
    pub(crate) rest: Option<Arc<dyn Dispatcher>>,
    /// For endpoints.
    pub(crate) clients: Option<Arc<EndpointClients>>,
}

impl Bulkhead {
    /// A bulkhead for each destination, with the sending end of its queue. The order is: destinations with a URL,
    /// feeds, destinations inside the process, the application's own dispatcher, and one bulkhead for all endpoints (see
    /// [`serving`](crate::endpoints::serving)).
    pub(crate) fn all(config: &Config, dispatchers: Dispatchers) -> (Vec<Self>, Vec<Sender<Job>>) {
        let Dispatchers {
            urls,
            groups,
            rest,
            clients,
        } = dispatchers;
        let destinations = config.all_destinations();
        let urls = destinations.iter().zip(urls).map(|(one, dispatcher)| {
            let limits = Limits::new(&one.policy, config, Some(one.request_batch));
            let serves = SendsTo::Dispatcher(dispatcher);
            let gate = Gate::new(&one.name, one.policy.rate, one.policy.breaker, None);
            Self::new(&one.name, gate, limits, serves)
        });
        let plain = |name, policy: &DeliveryPolicy, batch, serves| {
            let limits = Limits::new(policy, config, batch);
            Self::new(name, Gate::open(name, policy.rate), limits, serves)
        };
        let feeds = config.feeds.iter().map(|one| {
            let limits = Limits::of_feed(&one.policy(), config);
            Self::new(
                &one.name,
                Gate::open(&one.name, None),
                limits,
                SendsTo::Feed,
            )
        });
        let groups = config.in_process.iter().zip(groups);
        let groups = groups.map(|(local, group)| {
            plain(&local.name, &local.policy, None, SendsTo::Handlers(group))
        });
        let rest = rest.map(|dispatcher| {
            let (policy, batch) = (DeliveryPolicy::default(), Some(RequestBatch::default()));
            plain(REST, &policy, batch, SendsTo::Dispatcher(dispatcher))
        });
        let registered = clients.is_some().then(|| {
            let policy = DeliveryPolicy {
                concurrency: Some(config.endpoint_threads),
                timeout: Some(config.endpoint_timeout),
                ..DeliveryPolicy::default()
            };
            let most = most_threads(config.endpoint_threads);
            plain(ENDPOINTS, &policy, None, SendsTo::Members(most))
        });
        let configured = urls.chain(feeds).chain(groups);
        Self::numbered(configured.chain(rest).chain(registered).collect())
    }
}

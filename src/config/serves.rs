//! What a relay with these settings serves.

use super::{Config, DEFAULT_DESTINATION, Route};
use crate::engine::serves::routes::{Routes, Serves};

impl Config {
    /// The names of all destinations: those with a URL, feeds, and those inside the process.
    pub(crate) fn destination_names(&self) -> impl Iterator<Item = String> {
        let urls = self.all_destinations().into_iter().map(|one| one.name);
        let feeds = self.feeds.iter().map(|one| one.name.clone());
        urls.chain(feeds)
            .chain(self.in_process.iter().map(|one| one.name.clone()))
    }

    /// All routes, most specific first, which is the order in which they are tried. With `OUTBOX_URL`, the
    /// last route is `*` to `default`, unless another route serves `*`.
    pub(crate) fn all_routes(&self) -> Vec<Route> {
        let mut routes = self.routes.clone();
        if self.url.is_some() && !routes.iter().any(|route| route.topic == "*") {
            routes.push(Route::new("*", DEFAULT_DESTINATION));
        }
        routes.sort_by_key(|route| {
            let prefix = route.topic.split('*').next().unwrap_or_default().len();
            std::cmp::Reverse((!route.topic.contains('*'), prefix, route.topic.len()))
        });
        routes
    }
}

impl Serves {
    /// What a relay with these settings serves, without endpoints.
    pub(crate) fn new(config: &Config) -> Self {
        let routes = config.all_routes().into_iter();
        let destinations = config.all_destinations().into_iter();
        let groups = config.in_process.iter();
        let of_groups = groups
            .clone()
            .map(|one| (one.name.clone(), one.policy.rate));
        let rates = config.all_destinations().into_iter();
        let rates = rates
            .map(|one| (one.name, one.policy.rate))
            .chain(of_groups);
        let rates = rates.filter_map(|(name, rate)| Some((name, rate?.to_string())));
        Self {
            rates: rates.collect(),
            routes: routes.map(|route| (route.topic, route.to)).collect(),
            destinations: destinations
                .map(|one| one.name)
                .chain(config.feeds.iter().map(|one| one.name.clone()))
                .collect(),
            handlers: groups
                .map(|group| (group.name.clone(), group.topics.clone()))
                .collect(),
            rest: config.takes_rest,
            members: false,
            only: config.only.clone(),
            declared: config.topics.clone(),
        }
    }
}

impl Routes {
    /// The routes of valid settings.
    pub(crate) fn new(config: &Config) -> Self {
        Self::of(Serves::new(config))
    }
}

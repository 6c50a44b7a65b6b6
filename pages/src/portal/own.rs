//! The way of the portal to the database: everything is limited to the tenant of the visitor.

use std::time::{Duration, Instant};

use diesel::{Connection, PgConnection};
use diesel_outbox::admin::{Bulk, Bulked, Note};
use diesel_outbox::endpoints::{EndpointError, Endpoints};
use diesel_outbox::program::{self, Act, Cost, EndpointAct, EndpointPreview, kept_for};
use diesel_outbox::{Outbox, OutboxName};

use super::session::Session;
use super::words::Words;
use super::{Portal, Refusal};
use crate::AUDIT;
use crate::database::{Act as Together, Database, LONGEST_ACT};

/// The reason that is recorded with the acts of customers.
pub(super) const PORTAL: &str = "portal";
const DRY_RUN: &str = "portal, dry run";
/// After this time, a dry run has counted enough.
const LONGEST_COUNT: Duration = Duration::from_secs(5);

/// The party of the acts that make many messages, of all tenants.
const MANY: &str = "many";

/// Whether an act on many messages makes them, or only counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Many {
    Make,
    Count,
}

/// What belongs to the tenant of a visitor. Only a session makes one, and no page reads or writes in another way: each
/// statement has the tenant as a condition.
#[derive(Clone, Copy)]
pub(super) struct Own<'a> {
    pub(super) portal: &'a Portal,
    pub(super) session: &'a Session,
    /// All that the request does is one transaction.
    together: Option<Together<'a>>,
}

impl<'a> Own<'a> {
    pub(super) fn of(
        portal: &'a Portal,
        session: &'a Session,
        together: Option<Together<'a>>,
    ) -> Self {
        Self {
            portal,
            session,
            together,
        }
    }

    /// Whether the answers of endpoints are shown: without the rule of public addresses, an internal server may have
    /// answered.
    pub(super) fn shows_responses(self) -> bool {
        self.session.rights.payloads && self.portal.config.endpoint_public_only
    }

    /// What a disabled endpoint gets, with what the ledger keeps.
    pub(super) fn while_disabled(self, words: &Words) -> String {
        let missed = match kept_for(&self.portal.config) {
            Some(time) => words.missed_is_kept.replace("{}", &time),
            None => words.missed_is_lost.to_owned(),
        };
        format!("{} {missed}", words.while_disabled)
    }

    /// Reads.
    pub(super) fn read<T>(
        &self,
        work: impl FnOnce(&mut PgConnection, Endpoints<'_>) -> Result<T, EndpointError>,
    ) -> Result<T, Refusal> {
        let party = self.session.party();
        self.run(&self.portal.reads, &party, |conn, _, own| work(conn, own))
    }

    /// Changes an endpoint, and records who did. An error undoes the change. `false` of `work`: there is no such
    /// endpoint.
    pub(super) fn change(
        &self,
        act: Act,
        name: &str,
        cost: Cost,
        work: impl FnOnce(&mut PgConnection, Endpoints<'_>) -> Result<bool, EndpointError>,
    ) -> Result<(), Refusal> {
        let work = |conn: &mut PgConnection, own: Endpoints<'_>| {
            work(conn, own).map(|is_there| is_there.then_some(()))
        };
        self.act(act, name, cost, work)
    }

    /// Prepares a request to an endpoint, and records who sends it. `None` of `prepare`: there is no such endpoint.
    pub(super) fn send<T>(
        &self,
        act: Act,
        name: &str,
        prepare: impl FnOnce(&mut PgConnection, Endpoints<'_>) -> Result<Option<T>, EndpointError>,
    ) -> Result<T, Refusal> {
        self.act(act, name, Cost::Request, prepare)
    }

    /// Performs an act that operators have, too, and that records who did.
    pub(super) fn perform(
        &self,
        act: Act,
        name: &str,
        cost: Cost,
        work: impl FnOnce(&mut PgConnection, Endpoints<'_>, &Note) -> Result<bool, EndpointError>,
    ) -> Result<(), Refusal> {
        self.within_budget(act, name, |conn, _, own| {
            let is_there = work(conn, own, &self.note(cost))?;
            Ok(is_there.then_some(()))
        })
    }

    /// Enables, disables or removes an endpoint.
    pub(super) fn change_state(&self, act: &EndpointAct, name: &str) -> Result<(), Refusal> {
        let cost = match act.act {
            // Relays ask an endpoint that is not verified at once.
            Act::EnableEndpoint => Cost::Request,
            _ => Cost::Change,
        };
        self.perform(act.act, name, cost, |conn, own, note| {
            act.perform(conn, own, name, note)
        })
    }

    /// What an act would do to the endpoint. Counting costs the tenant its time.
    pub(super) fn preview(
        &self,
        act: &EndpointAct,
        name: &str,
    ) -> Result<EndpointPreview, Refusal> {
        let (tenant, party) = (self.session.tenant, self.session.party());
        self.run(&self.portal.changes, &party, |conn, outbox, own| {
            if program::is_budget_spent(conn, outbox, tenant)? {
                return Ok(Err(Refusal::TooOften));
            }
            let began = Instant::now();
            let Some(found) = act.preview(conn, own, name, &self.portal.config)? else {
                return Ok(Err(Refusal::NotFound));
            };
            let note = program::note_of_tenant(
                &self.session.who,
                DRY_RUN,
                tenant,
                Cost::Search(began.elapsed()),
            );
            program::audit(conn, outbox, &note, act.act, name)?;
            Ok(Ok(found))
        })?
    }

    fn act<T>(
        &self,
        act: Act,
        name: &str,
        cost: Cost,
        work: impl FnOnce(&mut PgConnection, Endpoints<'_>) -> Result<Option<T>, EndpointError>,
    ) -> Result<T, Refusal> {
        self.within_budget(act, name, |conn, outbox, own| {
            let done = work(conn, own)?;
            if done.is_some() {
                program::audit(conn, outbox, &self.note(cost), act, name)?;
            }
            Ok(done)
        })
    }

    /// The one place of a customer's acts: the budget of the tenant pays for each, over all processes. `None` of `work`:
    /// there is no such endpoint.
    fn within_budget<T>(
        &self,
        act: Act,
        name: &str,
        work: impl FnOnce(
            &mut PgConnection,
            &OutboxName,
            Endpoints<'_>,
        ) -> Result<Option<T>, EndpointError>,
    ) -> Result<T, Refusal> {
        let tenant = self.session.tenant;
        let party = self.session.party();
        let done = self.run(&self.portal.changes, &party, |conn, outbox, own| {
            program::hold_budget(conn, outbox, tenant)?;
            if program::is_budget_spent(conn, outbox, tenant)? {
                return Ok(Err(Refusal::TooOften));
            }
            Ok(work(conn, outbox, own)?.ok_or(Refusal::NotFound))
        })??;
        self.log(act, name);
        Ok(done)
    }

    fn log(&self, act: Act, name: &str) {
        let (who, tenant) = (self.session.who.clone(), self.session.tenant);
        let name = name.to_owned();
        let line = move || log::info!(target: AUDIT, event = "portal_act", who = who, tenant:% = tenant, destination = name, what:? = act; "{who:?} of tenant {tenant} changed {name:?} in the portal: {act:?}");
        match self.together {
            Some(together) => together.after(Box::new(line)),
            None => line(),
        }
    }

    /// Makes many messages, or only counts them: one such act of the tenant at a time, and those of all tenants together leave
    /// connections to other changes. Records in the history who did. Does not hold the budget: this takes long, and other
    /// acts of the tenant would wait. What it costs is known at its end, also if it finds nothing or fails. `true`: the time was too
    /// short for all.
    pub(super) fn make_many(
        &self,
        act: Act,
        name: &str,
        many: Many,
        work: impl FnOnce(
            &mut PgConnection,
            Endpoints<'_>,
            Bulk<'_>,
        ) -> Result<Option<Bulked>, EndpointError>,
    ) -> Result<(Bulked, bool), Refusal> {
        let longest = match many {
            Many::Make => LONGEST_ACT,
            Many::Count => LONGEST_COUNT,
        };
        let (who, tenant) = (&self.session.who, self.session.tenant);
        self.run(&self.portal.changes, MANY, |conn, outbox, own| {
            if !program::may_make_many(conn, outbox, tenant)? {
                return Ok(Err(Refusal::TooOften));
            }
            let began = Instant::now();
            let note = self.note(Cost::Change);
            let bulk = Bulk::new(&note).progress(|_| began.elapsed() < longest);
            let bulk = match many {
                Many::Make => bulk,
                Many::Count => program::searching_for(bulk.dry_run(), longest),
            };
            let done = conn.transaction(|conn| work(conn, own, bulk));
            let took = began.elapsed();
            let has_paid = match &done {
                Ok(Some(done)) => {
                    many == Many::Make && done.changed > 0 && took < program::SEARCH_UNIT
                }
                Ok(None) => true,
                Err(_) => false,
            };
            if !has_paid {
                let why = match many {
                    Many::Make => "portal, search",
                    Many::Count => DRY_RUN,
                };
                let note = program::note_of_tenant(who, why, tenant, Cost::Search(took));
                let recorded = program::audit(conn, outbox, &note, act, name);
                // The first failure says more.
                if done.is_ok() {
                    recorded?;
                }
            }
            Ok(match done {
                Ok(done) => done
                    .map(|done| (done, took >= longest))
                    .ok_or(Refusal::NotFound),
                Err(EndpointError::Database(error)) => Err(Refusal::Unavailable(error.into())),
                Err(error) => Err(Refusal::Error(error)),
            })
        })?
    }

    /// Records what an endpoint has answered to a request that was paid for.
    pub(super) fn record<T>(
        &self,
        work: impl FnOnce(&mut PgConnection, Endpoints<'_>) -> Result<T, EndpointError>,
    ) -> Result<T, Refusal> {
        let party = self.session.party();
        self.run(&self.portal.changes, &party, |conn, _, own| work(conn, own))
    }

    fn note(&self, cost: Cost) -> Note {
        program::note_of_tenant(&self.session.who, PORTAL, self.session.tenant, cost)
    }

    fn run<T>(
        &self,
        database: &Database,
        party: &str,
        work: impl FnOnce(&mut PgConnection, &OutboxName, Endpoints<'_>) -> Result<T, EndpointError>,
    ) -> Result<T, Refusal> {
        let done = database.within(self.together, party, |conn, name| {
            let outbox = Outbox::from(name.clone());
            let all = outbox
                .endpoints()
                .with_keys(&self.portal.config.secret_keys);
            let own = all.of_tenant(self.session.tenant);
            match conn.transaction(|conn| work(conn, name, own)) {
                Err(EndpointError::Database(error)) => Err(error.into()),
                done => Ok(done),
            }
        });
        match done {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => Err(Refusal::Error(error)),
            Err(error) => Err(Refusal::Unavailable(error)),
        }
    }
}

//! One of the two databases, and the leases and messages seen there.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::time::{Duration, Instant, SystemTime};

use uuid::Uuid;

use super::question::{Ask, Question, Strip};
use super::{LONG, Row, TURN, pause_turns, turns};
use crate::config::OnDead;
use crate::engine::claim::sql::claim::{
    Batch, Claimant, Claimed, Lane, Longest, Position, Runs, Stream,
};
use crate::engine::claim::sql::late::LookForLate;
use crate::engine::claim::sql::page::Page;
use crate::engine::claim::sql::search;
use crate::engine::claim::sql::streams::FoundStream;
use crate::engine::host::database::{Asks, Database, DatabaseResult, Taken, Which};
use crate::engine::host::registration;
use crate::engine::host::session::AfterRefusal;
use crate::engine::host::settings::Settings;
use crate::engine::keys::sql::ordered::Key;
use crate::engine::lease::sql::lease::{LeaseId, Registration};
use crate::engine::plan::Streams;
use crate::engine::plan::to::To;
use crate::engine::send::bulkhead::Bulkhead;
use crate::engine::send::gate::GateNews;
use crate::engine::send::job::{Job, Terms};
use crate::engine::send::sql::pause::Paused;
use crate::engine::send::verdict::Verdict;
use crate::engine::settle::settlement::Settlement;
use crate::engine::settle::sql::settle::{Claim, Trace};
use crate::engine::settle::sql::split::Piece;
use crate::engine::settle::written::Settle;
use crate::message::Message;
use crate::simulation::tables;
use crate::sql::brief::{Locks, Tried};
use crate::sql::range::Range;
use crate::status::ReasonCode;

pub(super) struct Side<'a, D> {
    db: D,
    /// A second connection, for a transaction that stays open.
    pub(super) other: D,
    settings: &'a Settings,
    bulkheads: &'a [Bulkhead],
    now: fn() -> Instant,
    /// In the order of registration: the numbers that questions use.
    pub(super) leases: Vec<LeaseId>,
    pub(super) claimed: Vec<Message>,
    /// The time of each message, when it was first claimed.
    times: HashMap<Uuid, SystemTime>,
    /// The positions of the live messages.
    places: BTreeMap<i64, Position>,
}

/// Runs of this many messages behind the first.
struct Behind(usize);

impl Runs for Behind {
    fn longest(&self, first: &[Claimed]) -> Vec<Longest> {
        let longest = Longest {
            messages: self.0,
            bytes: usize::MAX,
        };
        vec![longest; first.len()]
    }

    fn goes_along(&self, first: &Message, topic: &str) -> bool {
        let goes_to = |topic: &str| tables::goes_to(topic, &first.destination);
        goes_to(topic) == goes_to(&first.topic)
    }
}

/// The time in half turns, rounded.
fn half_turns(time: Duration) -> u64 {
    (time + TURN / 4).as_secs() / (TURN / 2).as_secs()
}

fn told(answer: impl Debug) -> String {
    format!("{answer:?}")
}

fn told_pauses(pauses: Vec<Paused>) -> Vec<String> {
    let told = |one: Paused| {
        let left = one.left.map(half_turns);
        let Paused {
            kind,
            name,
            reason,
            by,
            openings,
            left: _,
        } = one;
        format!("{kind} {name} {by} {reason} {openings} {left:?}")
    };
    pauses.into_iter().map(told).collect()
}

impl<'a, D: Database> Side<'a, D> {
    pub(super) fn new(
        [db, other]: [D; 2],
        settings: &'a Settings,
        bulkheads: &'a [Bulkhead],
        now: fn() -> Instant,
    ) -> Self {
        Self {
            db,
            other,
            settings,
            bulkheads,
            now,
            leases: Vec::new(),
            claimed: Vec::new(),
            times: HashMap::new(),
            places: BTreeMap::new(),
        }
    }

    pub(super) fn number(&self, lease: i64) -> Option<usize> {
        self.leases.iter().position(|id| id.0 == lease)
    }

    fn behind(&self, message: Option<i64>) -> Position {
        message.map_or(Position::START, |sequence| self.places[&sequence])
    }

    /// The message at a position; `None`: no message has this position.
    fn message_at(&self, at: Position) -> Option<i64> {
        (self.places.get(&at.sequence) == Some(&at)).then_some(at.sequence)
    }

    /// The rows as text, in the order of their times, with numbers for leases.
    pub(super) fn told_rows(&mut self, mut rows: Vec<Row>) -> Vec<String> {
        let place = |row: &Row| Position {
            available_at: row.at.map_or(0, |at| at.0),
            sequence: row.sequence,
        };
        let table = |row: &Row| row.what.split(' ').next().map(str::to_owned);
        // Messages not by their times: questions take longer in PostgreSQL than in the simulation, so times that are close
        // together may differ in order. Claims have their order compared.
        let order = |row: &Row| match row.sequence {
            0 => place(row),
            sequence => Position {
                available_at: 0,
                sequence,
            },
        };
        rows.sort_by_key(|row| (table(row), order(row), row.what.clone()));
        let live = rows.iter().filter(|row| row.what.starts_with("live"));
        self.places = live.map(|row| (row.sequence, place(row))).collect();
        let told = |row: Row| {
            let lease = row.lease.map(|id| self.number(id));
            format!("{} {} {lease:?}", row.sequence, row.what)
        };
        rows.into_iter().map(told).collect()
    }

    fn told_batch(&mut self, batch: Option<Batch>) -> String {
        let Some(batch) = batch else {
            return "another transaction claims".to_owned();
        };
        let Batch {
            mut claimed,
            behind,
            is_cut,
            // The server has another number.
            registrations: _,
        } = batch;
        claimed.sort_by_key(|one| one.message.sequence);
        let mut told = format!("is cut: {is_cut}, first {}", claimed.len());
        for one in claimed.into_iter().chain(behind) {
            let message = one.message;
            let time = message.occurred_at.unwrap_or(message.created_at);
            let first = *self.times.entry(message.message_id).or_insert(time);
            let left = |at: Instant| half_turns(at.saturating_duration_since(message.claimed));
            told += &format!(
                "\n    {:?} {} {} {} {:?} {} {:?} {:?} {:?} {:?} {}",
                self.message_at(one.position),
                message.message_id,
                message.topic,
                message.destination,
                message.ordering_key,
                message.attempts,
                one.taken_over,
                one.known,
                message.expires.map(left),
                message.headers,
                time == first,
            );
            self.claimed.push(*message);
        }
        told
    }

    fn told_streams(&self, found: Option<Vec<FoundStream>>) -> Vec<String> {
        let found = found.into_iter().flatten();
        let told = |one: FoundStream| format!("{:?} {:?}", one.stream, self.message_at(one.first));
        let mut told: Vec<String> = found.map(told).collect();
        told.sort_unstable();
        told
    }

    pub(super) fn register(
        &mut self,
        lasts: u32,
        is_single_active: bool,
    ) -> DatabaseResult<String> {
        let id = self.db.register(&Registration {
            relay: "relay".to_owned(),
            lease: turns(lasts),
            is_single_active,
            serves: registration(self.settings, "relay", false, false).serves,
            records_topics: true,
            settings: None,
        })?;
        self.leases.push(id);
        Ok(String::new())
    }

    /// The database's answer as text, without ids and times.
    pub(super) fn answer(&mut self, question: &Question) -> DatabaseResult<String> {
        if !question.stays_open {
            return self.ask(question);
        }
        std::mem::swap(&mut self.db, &mut self.other);
        let answer = self.ask(question);
        std::mem::swap(&mut self.db, &mut self.other);
        answer
    }

    fn ask(&mut self, question: &Question) -> DatabaseResult<String> {
        let lease = self.leases[question.lease];
        let expired = question.expired.iter().map(|number| self.leases[*number].0);
        let expired: Vec<i64> = expired.collect();
        let messages = question
            .claims
            .iter()
            .map(|number| self.claimed[*number].clone());
        let messages: Vec<Message> = messages.collect();
        let claims: Vec<Claim> = messages.iter().map(Claim::of).collect();
        let behind = Behind(question.behind);
        let by = Claimant {
            expired: &expired,
            bytes: question.bytes,
            runs: Some(&behind),
            ..Claimant::of(lease)
        };
        let db = &mut self.db;
        Ok(match &question.ask {
            Ask::Enqueue(_)
            | Ask::Commit
            | Ask::RollBack
            | Ask::LetGo
            | Ask::TimePasses
            | Ask::Requeue(_)
            | Ask::Discard(_)
            | Ask::Cancel(_)
            | Ask::Reschedule(..)
            | Ask::Replay(_)
            | Ask::Forget
            | Ask::Replicate
            | Ask::FailOver => String::new(),
            Ask::Register(lasts, is_single_active) => self.register(*lasts, *is_single_active)?,
            Ask::Renew(by) => told(db.renew(lease, turns(*by), None, None)?),
            Ask::IsThere => told(db.look(lease)?.map(|seen| seen.stands_by)),
            Ask::End => told(db.end(lease)?),
            Ask::Expire => told(db.renew(lease, Duration::ZERO, None, None)?),
            Ask::Survey(known) => {
                let streams = known.clone().map_or(Streams::All, Streams::Beside);
                let asks = Asks {
                    locks: Locks::WaitedFor,
                    marks: false,
                    read_to: None,
                };
                let found = db.survey(lease, &streams, LONG, asks)?;
                let Tried::Done(pauses) = found.paused else {
                    panic!("a survey that waits for locks reads the pauses");
                };
                let streams = self.told_streams(found.streams);
                let ended: Vec<_> = found.ended.iter().map(|id| self.number(*id)).collect();
                told((streams, ended, found.is_active, told_pauses(pauses)))
            }
            Ask::Claim(strips, room) => {
                let lanes = self.lanes(strips);
                let taken = self.db.claim(by, Which::Plain(&lanes, *room))?;
                self.told_batch(taken.batch)
            }
            Ask::ClaimDue(strips, room) => {
                let lanes = self.lanes(strips);
                let goes_to = strips.iter().map(|strip| strip.goes_to.to_owned());
                let goes_to: Vec<String> = goes_to.collect();
                let which = Which::Due(&lanes, &goes_to, *room);
                let Taken { batch, reached } = self.db.claim(by, which)?;
                let found = |(stream, first): (Stream, Position)| FoundStream { stream, first };
                let reached = self.told_streams(Some(reached.into_iter().map(found).collect()));
                let batch = self.told_batch(batch);
                format!("{reached:?} {batch}")
            }
            Ask::ClaimKeyed(candidates) => {
                let taken = db.claim(by, Which::First(candidates))?;
                self.told_batch(taken.batch)
            }
            Ask::ClaimChosen(sequences) => {
                let taken = db.claim(by, Which::Chosen(sequences))?;
                self.told_batch(taken.batch)
            }
            Ask::Walk(from) => self.told_found(&expired, &search::Ask::Walk(from.clone()))?,
            Ask::FirstOf(keys) => self.told_found(&expired, &search::Ask::Keys(keys.clone()))?,
            Ask::Free(range) => self.told_found(&expired, &search::Ask::Range(*range))?,
            Ask::Late(Range { after, upto }) => {
                let look = LookForLate {
                    behind: Some(*after),
                    due_before: i64::MAX,
                    known: *upto,
                };
                self.told_found(&expired, &search::Ask::Late(look))?
            }
            Ask::Expired(stream, after) => {
                let ask = search::Ask::Expired(stream.clone(), self.behind(*after));
                self.told_found(&expired, &ask)?
            }
            Ask::ReleaseUnknown(range) => {
                let range = *range;
                told(db.release_unknown(lease, range, &claims, LONG)?)
            }
            Ask::Settle {
                verdict,
                keys_continue,
                blocks_key,
                closed,
                parts,
            } => {
                let settlement = |message| {
                    let terms = Terms {
                        on_dead: if *blocks_key {
                            OnDead::Block
                        } else {
                            OnDead::Continue
                        },
                        expires_after: None,
                    };
                    let job = Job::new(Box::new(message), lease, To::Bulkhead(0), terms);
                    Settlement::unsent(job, self.bulkheads, Verdict::clone(verdict))
                };
                let keys = messages.iter().filter(|_| *keys_continue);
                let keys = keys.filter_map(|one| Some((one.sequence.0, Key::of(one)?)));
                let keys: HashMap<i64, Key> = keys.collect();
                let mut group: Vec<Settlement> = messages.into_iter().map(settlement).collect();
                if question.is_run && group[0].is_delivered() {
                    group[0].behind = group.split_off(1);
                }
                let settle = Settle {
                    settings: self.settings,
                    bulkheads: self.bulkheads,
                    claimant: Claimant {
                        bytes: question.bytes,
                        runs: Some(&behind),
                        ..Claimant::of(lease)
                    },
                    kind: group[0].kind(),
                    group: &group,
                    keys: &keys,
                    closed,
                    piece: Piece {
                        parts: *parts,
                        bytes: usize::MAX,
                    },
                };
                let (mut written, next) = db.settle(AfterRefusal::Reconnect, &settle)?;
                written.changed.sort_unstable();
                written.in_conflict.sort_unstable();
                written.unfinished.sort_unstable();
                let next = self.told_batch(Some(next));
                format!(
                    "{:?} {:?} {:?} {next}",
                    written.changed, written.in_conflict, written.unfinished
                )
            }
            Ask::Settled => {
                let trace = |message: &Message| Trace {
                    claim: Claim::of(message),
                    message_id: message.message_id,
                };
                let traces: Vec<Trace> = messages.iter().map(trace).collect();
                told(db.settled(AfterRefusal::Reconnect, &traces)?)
            }
            Ask::Pause(which, lasts) => {
                let until = lasts.map(|lasts| (self.now)() + pause_turns(lasts));
                told(db.tell_pause(which, GateNews::Paused(ReasonCode::RateLimited, until))?)
            }
            Ask::Open(which, lasts, openings) => {
                let until = (self.now)() + pause_turns(*lasts);
                told(db.tell_pause(which, GateNews::Opened(until, *openings))?)
            }
            Ask::Recover(which) => told(db.tell_pause(which, GateNews::Recovered)?),
            Ask::TakeProbe(which, hold) => {
                told(match db.take_probe(which, pause_turns(*hold))? {
                    Tried::Done((is_ours, pauses)) => Tried::Done((is_ours, told_pauses(pauses))),
                    Tried::Locked => Tried::Locked,
                })
            }
            Ask::GiveBackProbe(which) => told(db.release_probe(which)?),
        })
    }

    /// A page, in the order of the sequences. Times and transaction numbers are not compared: other tests write to the
    /// same server.
    fn told_found(&mut self, expired: &[i64], ask: &search::Ask) -> DatabaseResult<String> {
        let Page {
            mut found,
            next,
            moment,
        } = self.db.find(expired, ask, LONG)?.expect("no timeout");
        found.sort_unstable_by_key(|one| one.sequence);
        let found: Vec<_> = found
            .iter()
            .map(|one| (one.sequence, one.found().stream, one.key()))
            .collect();
        let newest = moment.and_then(|moment| moment.newest);
        Ok(format!("{found:?} {next:?} {newest:?}"))
    }

    fn lanes(&self, strips: &[Strip]) -> Vec<Lane> {
        let lane = |strip: &Strip| Lane {
            stream: strip.stream.clone(),
            room: strip.room,
            after: self.behind(strip.after),
        };
        strips.iter().map(lane).collect()
    }
}

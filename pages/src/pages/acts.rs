//! Acts on many messages: a question with the count, then the act. The library lists and carries out the acts.

use std::time::{Duration, Instant, SystemTime};

use diesel_outbox::admin::{Bulk, Note};
use diesel_outbox::program::{
    ACTS, ActError, Choice, Chosen, ManyAct, MessageRecord, Performed, Preview, WrongChoice,
};
use maud::html;

use super::asked::{Asked, Wrong};
use super::layout::{act, dialog, hidden};
use super::messages::waiting;
use super::{Refusal, Visit, dead, link, words};
use crate::AUDIT;
use crate::database::{LONGEST_ACT, STATEMENT_TIMEOUT};
use crate::response::Response;

/// The act with this path.
pub(super) fn at(path: &str) -> Option<&'static dyn ManyAct> {
    let mut acts = ACTS.iter().copied();
    acts.find(|act| act.words().path == path)
}

/// What an act has done, and how many messages it has left because its time has ended.
pub(super) struct Done {
    pub(super) performed: Performed,
    pub(super) left: u64,
}

/// Counts what the act would change.
pub(super) fn preview(
    visit: &Visit<'_>,
    act: &dyn ManyAct,
    which: &Choice,
) -> Result<Preview, Refusal> {
    let found = visit.run(&visit.site.changes, |conn, outbox| {
        unknown_aside(act.preview(conn, outbox, which))
    })?;
    found.map_err(Refusal::Invalid)
}

/// Carries the act out, for some seconds.
pub(super) fn perform(
    visit: &Visit<'_>,
    act: &'static dyn ManyAct,
    which: &Choice,
    preview: &Preview,
    why: &str,
) -> Result<Done, Refusal> {
    let note = Note::new(&visit.guest.who, why);
    let told = act.words();
    let event = format!("admin_{}", told.name);
    let (began, mut is_stopped, mut so_far) = (Instant::now(), false, 0);
    let done = visit
        .site
        .changes
        .in_steps(&visit.request.path, |conn, outbox| {
            let bulk = Bulk::new(&note).statement_timeout(STATEMENT_TIMEOUT);
            let bulk = bulk.progress(|done| {
                so_far = done.changed;
                is_stopped = began.elapsed() >= LONGEST_ACT;
                !is_stopped
            });
            unknown_aside(act.perform(conn, outbox, which, bulk))
        });
    let (what, why) = (which.to_string(), why.to_owned());
    let performed = match done {
        Ok(done) => done.map_err(Refusal::Invalid)?,
        Err(error) => {
            let matched = preview.count;
            log::warn!(target: AUDIT, event:% = event, who = visit.guest.who, peer:% = visit.guest.peer, what = what, matched = matched, changed = so_far, error:% = format!("{error:#}"); "admin page: {so_far} of {matched} {} {}, then failed: {error:#}", told.things.1, told.done);
            let count = words::counted(i64::try_from(so_far).unwrap_or(i64::MAX), "was", "were");
            let error = error.context(format!("{count} {} before the error", told.done));
            return Err(Refusal::Away(error));
        }
    };
    let bulked = performed.bulked;
    let (changed, matched) = (bulked.changed, preview.count);
    visit.log(move |who, peer| log::info!(target: AUDIT, event:% = event, who = who, peer:% = peer, what = what, matched = matched, changed = changed, why = why; "{who:?} {} {} on the admin page", told.done, told.counted(changed)));
    let rest = matched.saturating_sub(changed + bulked.skipped);
    Ok(Done {
        performed,
        left: if is_stopped { rest } else { 0 },
    })
}

/// An id that names nothing is the visitor's mistake, not the database's.
pub(super) fn unknown_aside<T>(
    found: Result<T, ActError>,
) -> Result<Result<T, String>, diesel_outbox::DatabaseError> {
    match found {
        Ok(found) => Ok(Ok(found)),
        Err(ActError::Database(error)) => Err(error),
        Err(error) => Ok(Err(error.to_string())),
    }
}

impl From<WrongChoice> for Wrong {
    fn from(WrongChoice { field, why }: WrongChoice) -> Self {
        Self { field, what: why }
    }
}

/// A form that was sent to an act.
struct Sent<'a> {
    visit: &'a Visit<'a>,
    act: &'static dyn ManyAct,
    asked: Asked<'a>,
    which: Choice,
    /// How many messages the visitor has confirmed, and when they were counted.
    sure: Option<u64>,
    counted_at: Option<SystemTime>,
}

/// The list that the act changes, and the fields of its filter.
fn list(act: &dyn ManyAct) -> (&'static str, &'static [&'static str]) {
    match act.words().path.starts_with("/dead/") {
        true => ("/dead", dead::NAMES),
        false => ("/messages", waiting::NAMES),
    }
}

pub(super) fn answer(visit: &Visit<'_>) -> Result<Response, Refusal> {
    let Some(act) = at(&visit.request.path) else {
        return Err(Refusal::Missing("This action does not exist.".to_owned()));
    };
    let asked = Asked::of(visit.form, list(act).1);
    let Some(which) = which(visit, act, asked)? else {
        let nothing = asked.link(list(act).0, &[("done", "nothing")]);
        return Ok(Response::see_other(&nothing));
    };
    let number = |name| visit.get(name).parse::<u64>().ok();
    let counted_at =
        number("counted_at").map(|micros| SystemTime::UNIX_EPOCH + Duration::from_micros(micros));
    let sent = Sent {
        visit,
        act,
        asked,
        which,
        sure: number("sure"),
        counted_at,
    };
    sent.answer()
}

/// The messages that were selected, or all that match the filter. `None`: none was selected.
fn which(
    visit: &Visit<'_>,
    act: &dyn ManyAct,
    asked: Asked<'_>,
) -> Result<Option<Choice>, Refusal> {
    let mut ids: Vec<String> = visit.form.all("letter").map(str::to_owned).collect();
    let mut chosen = Chosen::default();
    let is_of_letters = visit.request.path.starts_with("/dead/");
    let is_all = !is_of_letters || visit.form.get("all").is_some();
    if is_all {
        chosen = Chosen::of(|name| visit.form.get(name));
        ids.clear();
        if is_of_letters && !asked.get("q").is_empty() {
            let found = dead::find(visit, asked.get("q"), &asked.selection()?)?;
            ids.extend(
                found
                    .iter()
                    .map(|letter: &MessageRecord| letter.id().to_string()),
            );
            if ids.is_empty() {
                return Ok(None);
            }
            // They were found with the other conditions.
            chosen = Chosen::default();
        }
    } else if ids.is_empty() {
        return Ok(None);
    }
    // A form shows what it chooses: an empty filter means all.
    let all = ids.is_empty() && chosen.is_empty();
    let which = Choice::new(act, ids, &chosen, all);
    Ok(Some(which.map_err(|wrong| Refusal::Wrong(wrong.into()))?))
}

impl Sent<'_> {
    fn answer(&self) -> Result<Response, Refusal> {
        let (visit, act, words) = (self.visit, self.act, self.act.words());
        // Selected by hand: only what is lost for good is asked for.
        let is_asked = words.ends || !self.which.is_by_id();
        let which = self.which.clone();
        let which = match self.counted_at {
            Some(counted_at) => which.counted_at(counted_at),
            None => which,
        };
        let found = preview(visit, act, &which)?;
        let is_sure = match self.sure {
            Some(count) => found.count <= count,
            None => !is_asked,
        };
        if !is_sure {
            return Ok(self.question(&found));
        }
        let which = which.counted_at(found.counted_at);
        let done = perform(visit, act, &which, &found, visit.get("why"))?;
        Ok(Response::see_other(&self.next(&done)))
    }

    /// The confirmation page, which says how many messages the act changes, which first, and what becomes of them.
    fn question(&self, found: &Preview) -> Response {
        let (visit, words) = (self.visit, self.act.words());
        let verb = capital(words.name);
        let count = i64::try_from(found.count).unwrap_or(i64::MAX);
        let things = words::counted(count, words.things.0, words.things.1);
        let title = format!("{verb} {things}?");
        let counted_at = found.counted_at.duration_since(SystemTime::UNIX_EPOCH);
        let counted_at = counted_at.unwrap_or_default().as_micros().to_string();
        let sure = found.count.to_string();
        let given: Vec<(&str, &str)> = ["message", "all"]
            .into_iter()
            .filter_map(|name| Some((name, visit.form.get(name)?)))
            .collect();
        let form = html! {
            (self.asked.hidden())
            (hidden(&given))
            @if !visit.get("why").is_empty() { (hidden(&[("why", visit.get("why"))])) }
            @for letter in visit.form.all("letter") { input type="hidden" name="letter" value=(letter); }
            @if count > 0 && visit.get("why").is_empty() {
                label.field { "Why" input name="why" maxlength="400"; }
            }
            @if count > 0 { button.danger[words.ends].sure[words.ends] { (verb) " " (things) } }
            a.button.second href=(self.back()) { "No, go back" }
        };
        let content = html! {
            p { "Selected: " strong { (self.which) } "." }
            @if let Some(first) = found.first.as_ref().filter(|_| count > 1) {
                p { "The first: " strong { "#" (first.sequence) } " " (first.topic) "." }
            }
            @if self.sure.is_some() { p.refused { "More match than you confirmed." } }
            @for leaves in &found.leaves { p { (leaves) "." } }
            p { (words.becomes) " " (words::with_code(words.undo)) }
            (act(visit.guest, words.path, &[("sure", &sure), ("counted_at", &counted_at)], &form))
        };
        visit.page(&title).answer(&dialog(&title, &content))
    }

    /// The page that the form came from.
    fn back(&self) -> String {
        let mut letters = self.visit.form.all("letter");
        match (letters.next(), letters.next()) {
            (Some(letter), None) if self.visit.form.get("message").is_some() => {
                format!("/dead/{letter}")
            }
            _ => self.asked.link(list(self.act).0, &[]),
        }
    }

    /// The page to show next, with what was done.
    fn next(&self, done: &Done) -> String {
        let words = self.act.words();
        let (changed, left) = (
            done.performed.bulked.changed.to_string(),
            done.left.to_string(),
        );
        let mut told = vec![("done", words.done), ("count", changed.as_str())];
        if done.left > 0 {
            told.push(("left", &left));
        }
        // The page of one dead letter sends its idempotency key.
        match self.visit.form.get("message") {
            Some(key) if !words.ends => {
                link("/messages", &[[("q", key)].as_slice(), &told].concat())
            }
            _ => self.asked.link(list(self.act).0, &told),
        }
    }
}

pub(super) fn capital(word: &str) -> String {
    let mut letters = word.chars();
    let first = letters.next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(letters).collect()
}

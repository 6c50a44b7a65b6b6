//! How pages call endpoints.

use maud::{Markup, html};
use uuid::Uuid;

use super::{Visit, link, words};
use crate::labels::Labels;
use crate::text::without_secrets;

/// The most characters of a label.
const LONGEST: usize = 60;

impl Labels {
    /// Those of the destinations of a list. Only UUIDs are looked up: other names say enough.
    pub(super) fn of<'n>(
        visit: &Visit<'_>,
        names: impl Iterator<Item = &'n str>,
    ) -> anyhow::Result<Self> {
        let mut names = names.filter(|name| name.parse::<Uuid>().is_ok()).peekable();
        match names.peek() {
            None => Ok(Self::default()),
            Some(_) => visit.run(&visit.site.searches, |conn, outbox| {
                Self::read(conn, outbox, names)
            }),
        }
    }

    /// The name, or what tells a reader more than a UUID: the description, or the beginning of the URL.
    pub(super) fn label(&self, name: &str) -> String {
        let of_uuid = self.0.get(name).filter(|_| name.parse::<Uuid>().is_ok());
        let label = match of_uuid {
            Some((_, Some(description))) if !description.is_empty() => description.clone(),
            Some((url, _)) => without_secrets(url),
            None => return words::shortened(name, crate::text::LONGEST_NAME),
        };
        words::shortened(&label, LONGEST)
    }

    /// The label, with a link to the page of an endpoint.
    pub(super) fn shown(&self, name: &str) -> Markup {
        let label = self.label(name);
        match self.has(name) {
            true => {
                let page = link("/endpoints", &[("name", name)]);
                html! { a href=(page) title=(name) { (label) } }
            }
            false => words::name(name),
        }
    }
}

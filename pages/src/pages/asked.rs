//! The filter of a list, as it stands in a query or a form.

use std::fmt::Display;
use std::str::FromStr;

use diesel_outbox::admin::Selection;
use diesel_outbox::program::Chosen;
use maud::{Markup, html};
use uuid::Uuid;

use super::layout::hidden;
use super::{link, tenant};
use crate::request::Form;

/// A value that cannot be used.
pub(crate) struct Wrong {
    pub(crate) field: &'static str,
    /// A message for the guest.
    pub(crate) what: String,
}

/// The values of these fields.
#[derive(Clone, Copy)]
pub(super) struct Asked<'a> {
    names: &'static [&'static str],
    form: &'a Form,
}

impl<'a> Asked<'a> {
    pub(super) fn of(form: &'a Form, names: &'static [&'static str]) -> Self {
        Self { names, form }
    }

    /// Empty: not given.
    pub(super) fn get(&self, name: &str) -> &'a str {
        debug_assert!(self.names.contains(&name), "{name} is not declared");
        self.form.get(name).unwrap_or_default().trim()
    }

    pub(super) fn given(&self, name: &str) -> Option<String> {
        let value = self.get(name);
        (!value.is_empty()).then(|| value.to_owned())
    }

    pub(super) fn parsed<T: FromStr<Err: Display>>(
        &self,
        name: &'static str,
    ) -> Result<Option<T>, Wrong> {
        self.read(name, |value| value.parse().map(Some))
    }

    /// The value as `read` reads it.
    pub(super) fn read<T: Default, E: Display>(
        &self,
        name: &'static str,
        read: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<T, Wrong> {
        let value = self.given(name).map(|value| read(&value));
        let read = value.transpose().map_err(|error| Wrong {
            field: name,
            what: error.to_string(),
        });
        read.map(Option::unwrap_or_default)
    }

    pub(super) fn tenant(&self) -> Result<Option<Uuid>, Wrong> {
        self.read("tenant", tenant)
    }

    /// The messages that the values choose.
    pub(super) fn selection(&self) -> Result<Selection, Wrong> {
        Ok(self.chosen().selection()?)
    }

    /// The same, of messages that wait.
    pub(super) fn of_waiting(&self) -> Result<Selection, Wrong> {
        Ok(self.chosen().of_waiting()?)
    }

    fn chosen(&self) -> Chosen {
        let own = |name: &str| self.names.contains(&name);
        Chosen::of(|name| self.form.get(name).filter(|_| own(name)))
    }

    pub(super) fn pairs(&self) -> Vec<(&'static str, &'a str)> {
        self.names
            .iter()
            .map(|name| (*name, self.get(name)))
            .collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pairs().iter().all(|(_, value)| value.is_empty())
    }

    /// The list, with more values.
    pub(super) fn link(&self, path: &str, more: &[(&str, &str)]) -> String {
        link(path, &[self.pairs().as_slice(), more].concat())
    }

    pub(super) fn hidden(&self) -> Markup {
        hidden(&self.pairs())
    }

    /// A field of the form.
    pub(super) fn field(&self, label: &str, name: &str) -> Markup {
        html! { label.field { (label) input name=(name) value=(self.get(name)); } }
    }

    /// A choice of words, or of any.
    pub(super) fn choice<'b>(
        &self,
        label: &str,
        name: &str,
        words: impl IntoIterator<Item = &'b str>,
    ) -> Markup {
        let chosen = self.get(name);
        html! {
            label.field { (label)
                select name=(name) {
                    option value="" { "any" }
                    @for word in words { option value=(word) selected[chosen.eq_ignore_ascii_case(word)] { (word) } }
                }
            }
        }
    }

    /// The form of the filter. `label`: for screen readers.
    pub(super) fn form(&self, path: &str, label: &str, button: &str, fields: &Markup) -> Markup {
        html! {
            form.panel.filter method="get" action=(path) role="search" aria-label=(label) {
                (fields)
                div.do {
                    button { (button) }
                    @if !self.is_empty() { a href=(path) { "Show all" } }
                }
            }
        }
    }
}

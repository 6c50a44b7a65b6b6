//! The filter of a list, as it stands in a query or a form.

use std::fmt::Display;
use std::str::FromStr;

use diesel_outbox::ReasonCode;
use maud::{Markup, html};
use uuid::Uuid;

use super::layout::hidden;
use super::{link, tenant};
use crate::request::Form;

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

    /// The error is a message for the guest, as with the other values.
    pub(super) fn parsed<T: FromStr<Err: Display>>(&self, name: &str) -> Result<Option<T>, String> {
        let value = self.given(name).map(|value| value.parse());
        value.transpose().map_err(|error: T::Err| error.to_string())
    }

    pub(super) fn reason(&self) -> Result<Option<ReasonCode>, String> {
        let reason = self.given("reason").map(|one| one.to_uppercase().parse());
        reason
            .transpose()
            .map_err(|error: diesel_outbox::UnknownWord| error.to_string())
    }

    pub(super) fn tenant(&self) -> Result<Option<Uuid>, String> {
        tenant(self.get("tenant"))
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

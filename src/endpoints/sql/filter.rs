//! Filters: optional conditions that select rows, set one by one. And the conditions that the tables of messages share.

/// A filter with a method for each condition, public where `pub` stands. A condition that is not set selects everything.
macro_rules! filter {
    (
        $(#[$of_filter:meta])*
        pub struct $Filter:ident {
            $($(#[doc = $doc:literal])+ $visible:vis $condition:ident: $Value:ty,)+
        }
    ) => {
        $(#[$of_filter])*
        #[derive(Debug, Clone, Default)]
        #[non_exhaustive]
        pub struct $Filter {
            $(pub(crate) $condition: Option<$Value>,)+
        }

        impl $Filter {
            $(
                $(#[doc = $doc])+
                #[must_use]
                $visible fn $condition(mut self, $condition: impl Into<Option<$Value>>) -> Self {
                    self.$condition = $condition.into();
                    self
                }
            )+
        }
    };
}

/// The conditions of a filter for columns that have its names. A value that is not set is no condition.
macro_rules! equal {
    ($table:ident, $filter:ident: $($column:ident)+) => {
        [$(crate::sql::functions::given($filter.$column.as_ref(), |value| {
            $table::$column.assume_not_null().eq(value)
        })),+]
    };
}

/// Escapes the text for LIKE.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        if matches!(c, '%' | '_' | '\\') {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Whether a row is of this registration of a destination, or of none.
macro_rules! is_of_registration {
    ($table:ident, $registration:expr) => {{
        let is_it = $table::registration.assume_not_null().eq($registration);
        diesel::BoolExpressionMethods::or($table::registration.is_null(), is_it)
    }};
}

pub(crate) use {equal, filter, is_of_registration};

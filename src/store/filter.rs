//! Filters: optional conditions that select rows, set one by one.

/// A filter with a method for each condition. A condition that is not set selects everything.
macro_rules! filter {
    (
        $(#[$of_filter:meta])*
        pub struct $Filter:ident {
            $($(#[doc = $doc:literal])+ $condition:ident: $Value:ty,)+
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
                pub fn $condition(mut self, $condition: impl Into<Option<$Value>>) -> Self {
                    self.$condition = $condition.into();
                    self
                }
            )+
        }
    };
}

pub(crate) use filter;

//! The relay's binary against the receivers of `examples/receivers`. Third-party libraries for Standard Webhooks and
//! CloudEvents verify and read what the relay signs and sends, and those of OAuth, GitHub and Stripe what it authenticates with. Receivers written like these examples lose no message
//! and repeat no message.

#[path = "../support.rs"]
mod support;

mod example;
mod proxy;

mod auth;
mod catalogue;
mod duplicates;
mod modes;
mod refusals;
mod rotation;

/// Makes one test of each function for each library that the receivers use.
macro_rules! with_each_library {
    ($($claim:ident),+ $(,)?) => {
        mod python {
            $(#[test] fn $claim() { super::$claim(crate::example::Library::Python) })+
        }
        mod node {
            $(#[test] fn $claim() { super::$claim(crate::example::Library::Node) })+
        }
    };
}
pub(crate) use with_each_library;

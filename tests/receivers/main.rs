//! The relay's binary against the receivers of `examples/receivers`: what it signs and sends is what
//! other people's libraries for Standard Webhooks and CloudEvents verify and read, and receivers
//! that are written like these lose nothing and repeat nothing.

#[path = "../support.rs"]
mod support;

mod example;
mod proxy;

mod duplicates;
mod modes;
mod refusals;
mod rotation;

/// Makes a test of each function, for each of the libraries that the receivers are written with.
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

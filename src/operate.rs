//! What operators do and ask, with the words of health. It uses the engine and endpoints; the functions that
//! applications call are in `admin`, those of the program in `program`.

#[cfg(feature = "program")]
pub(crate) mod acts;
pub(crate) mod bulk;
#[cfg(feature = "program")]
pub(crate) mod chosen;
pub(crate) mod counts;
pub(crate) mod dead_letters;
pub(crate) mod depths;
pub(crate) mod due;
pub(crate) mod endpoints;
pub(crate) mod expunge;
pub(crate) mod forget;
pub(crate) mod keys;
pub(crate) mod messages;
pub(crate) mod overview;
pub(crate) mod pauses;
pub(crate) mod replay;
pub(crate) mod server;
pub(crate) mod sql;
pub(crate) mod states;
pub(crate) mod tail;
pub(crate) mod topics;
pub(crate) mod waiting;

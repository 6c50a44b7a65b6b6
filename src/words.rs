//! Enums whose values are words in the database, in settings or in output.

/// Declares an enum with a word for each value, and implements `Display`.
///
/// - `words! { pub enum … }` also gives it `ALL` and `as_str`.
/// - `words! { "status": pub enum … }` also gives it `ALL`, `as_str` and `FromStr`, with `unknown status "x"` as error.
/// - `words! { setting: pub enum … }` is for a value of a setting or a query: `read`, with the allowed words in the error.
macro_rules! words {
    (
        $(#[$attribute:meta])*
        $visible:vis enum $name:ident {
            $($(#[$of_value:meta])* $value:ident = $word:literal,)+
        }
    ) => {
        $(#[$attribute])*
        $visible enum $name {
            $($(#[$of_value])* $value,)+
        }

        impl $name {
            /// All values, in the order of their declaration.
            #[allow(dead_code, reason = "some are only written")]
            $visible const ALL: &[Self] = &[$(Self::$value),+];

            /// The stable word for the value: in tables, logs and output.
            $visible fn as_str(self) -> &'static str {
                match self {
                    $(Self::$value => $word,)+
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
    (
        $what:literal:
        $(#[$attribute:meta])*
        $visible:vis enum $name:ident {
            $($(#[$of_value:meta])* $value:ident = $word:literal,)+
        }
    ) => {
        $crate::words::words! {
            $(#[$attribute])*
            $visible enum $name {
                $($(#[$of_value])* $value = $word,)+
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::words::UnknownWord;

            fn from_str(word: &str) -> Result<Self, $crate::words::UnknownWord> {
                match word {
                    $($word => Ok(Self::$value),)+
                    _ => Err($crate::words::UnknownWord::new($what, word)),
                }
            }
        }
    };
    (
        setting:
        $(#[$attribute:meta])*
        $visible:vis enum $name:ident {
            $($(#[$of_value:meta])* $value:ident = $word:literal,)+
        }
    ) => {
        $(#[$attribute])*
        $visible enum $name {
            $($(#[$of_value])* $value,)+
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(match self {
                    $(Self::$value => $word,)+
                })
            }
        }

        impl $name {
            /// Reads the word. The error is the reason.
            pub(crate) fn read(word: &str) -> Result<Self, String> {
                match word {
                    $($word => Ok(Self::$value),)+
                    _ => Err($crate::words::not_one_of(word, &[$($word),+])),
                }
            }
        }
    };
}
pub(crate) use words;

/// `"x" is not retry, dead or pause`.
pub(crate) fn not_one_of(word: &str, allowed: &[&str]) -> String {
    let (last, others) = allowed.split_last().expect("an enum has values");
    format!("{word:?} is not {} or {last}", others.join(", "))
}

/// A word that is not a [`Status`](crate::Status) or [`ReasonCode`](crate::ReasonCode) of this version. It comes from a
/// database or an operator.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {word:?}")]
pub struct UnknownWord {
    what: &'static str,
    word: String,
}

impl UnknownWord {
    pub(crate) fn new(what: &'static str, word: &str) -> Self {
        Self {
            what,
            word: word.to_owned(),
        }
    }
}

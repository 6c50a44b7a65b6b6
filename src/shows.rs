//! `Debug` without what is secret, private or long.

/// Implements `Debug` with these fields, each its own or computed: `shows!(Message: topic, bytes = [payload.len()]);`
macro_rules! shows {
    (
        $(#[$doc:meta])*
        $type:ident $(<$lifetime:lifetime>)?: $($field:ident $(= [$($value:tt)+])?),* $(,)?
    ) => {
        impl std::fmt::Debug for $type $(<$lifetime>)? {
            $(#[$doc])*
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($type))
                    $(.field(stringify!($field), $crate::shows::shows!(@ self $field $([$($value)+])?)))*
                    .finish_non_exhaustive()
            }
        }
    };
    (@ $it:ident $field:ident) => {
        &$it.$field
    };
    (@ $it:ident $field:ident [$($value:tt)+]) => {
        &$it.$($value)+
    };
}
pub(crate) use shows;

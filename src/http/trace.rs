//! The W3C trace context. Each attempt continues the stored context with its own parent id.

/// `00-<32 digits>-<16 digits>-<2 digits>`
const LENGTH: usize = 55;
const DASHES: [usize; 3] = [2, 35, 52];

/// Continues a `traceparent` of version 00 with a new parent id, the bits of `random`. So the receiver's parent is this
/// attempt, not the span that enqueued the message. `None`: `stored` is not a valid `traceparent` of version 00.
///
/// A span for the attempt has the same bits as its id.
pub(crate) fn continued(stored: &str, random: u64) -> Option<String> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    let has_form = stored.len() == LENGTH
        && stored.bytes().enumerate().all(|(place, byte)| {
            if DASHES.contains(&place) {
                byte == b'-'
            } else {
                is_digit(byte)
            }
        });
    if !has_form {
        return None;
    }
    let mut parts = stored.split('-');
    let (version, trace_id, parent_id, flags) =
        (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_zero = |id: &str| id.bytes().all(|digit| digit == b'0');
    if version != "00" || is_zero(trace_id) || is_zero(parent_id) {
        return None;
    }
    // An id of all zeros is invalid.
    let parent_id = random.max(1);
    Some(format!("00-{trace_id}-{parent_id:016x}-{flags}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop_assert, prop_assert_eq, proptest};

    use super::*;

    const STORED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    #[test]
    fn a_trace_keeps_its_id_and_flags_and_gets_a_new_parent() {
        assert_eq!(
            continued(STORED, 0xab).as_deref(),
            Some("00-0af7651916cd43dd8448eb211c80319c-00000000000000ab-01")
        );
        assert_eq!(
            continued(STORED, 0).as_deref(),
            Some("00-0af7651916cd43dd8448eb211c80319c-0000000000000001-01")
        );
    }

    #[test]
    fn an_invalid_traceparent_is_not_continued() {
        for stored in [
            "",
            "00-ab-cd-01",
            "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-",
            "00-0af7651916cd43dd8448eb211c80319c_b7ad6b7169203331-01",
            " 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0",
            "00-0af7651916cd43dd8448eb211c8031é-b7ad6b7169203331-01x",
        ] {
            assert_eq!(continued(stored, 1), None, "{stored:?}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_continued_or_refused(text in "\\PC{0,60}|[0-9a-f-]{55}", random in any::<u64>()) {
            if let Some(next) = continued(&text, random) {
                prop_assert_eq!(&next[..36], &text[..36]);
                prop_assert_eq!(&next[52..], &text[52..]);
                prop_assert!(continued(&next, random).is_some());
            }
        }

        #[test]
        fn any_trace_is_continued(
            trace_id in "[1-9a-f][0-9a-f]{31}",
            parent_id in "[0-9a-f]{15}[1-9a-f]",
            flags in "[0-9a-f]{2}",
            random in 1..u64::MAX,
        ) {
            let next = continued(&format!("00-{trace_id}-{parent_id}-{flags}"), random);
            prop_assert_eq!(next, Some(format!("00-{trace_id}-{random:016x}-{flags}")));
        }
    }
}

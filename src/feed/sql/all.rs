//! All feeds that can be read, with or without a row of their own: a feed gets its row with its first event.

use crate::name::OutboxName;
use crate::sql::absent::all_endpoints_text;

/// The feeds, as a table of SQL text, which gives it an alias. Nobody reads what stands under the name of a feed without a row.
pub(super) fn all_feeds(name: &OutboxName) -> String {
    format!(
        "(SELECT f.name, f.registration, d.tenant_id, f.base, f.base_id, f.base_stored_at
            FROM (SELECT name, registration, base, base_id, base_stored_at FROM {feed}
                  UNION ALL
                  SELECT d.name, d.id, coalesce(e.position, 0), e.message_id, e.stored_at
                    FROM {endpoints} d LEFT JOIN LATERAL (SELECT position, message_id, stored_at FROM {event} e
                         WHERE e.feed = d.name ORDER BY position DESC LIMIT 1) e ON true
                   WHERE d.kind = 'feed' AND NOT EXISTS (SELECT FROM {feed} f WHERE f.name = d.name)) f
            LEFT JOIN {endpoints} d ON d.name = f.name AND d.id = f.registration AND d.kind = 'feed'
           WHERE f.registration IS NULL OR d.id IS NOT NULL)",
        feed = name.feed(),
        event = name.feed_event(),
        endpoints = all_endpoints_text(name),
    )
}

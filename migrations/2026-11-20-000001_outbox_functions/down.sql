-- Outboxes that the functions created stay: drop each with outbox_drop(name) before this migration. They still work
-- without the triggers, but relays find messages only by polling, plain inserts must give a message_id, and nothing
-- refuses a message that no relay can send.
DROP FUNCTION outbox_drop(text);
DROP FUNCTION outbox_create_endpoints(text);
DROP FUNCTION outbox_create_feeds(text);
DROP FUNCTION outbox_create(text);
DROP FUNCTION outbox_endpoint_limit(text, integer);
DROP FUNCTION outbox_wake() CASCADE;
DROP FUNCTION outbox_refuse() CASCADE;
DROP FUNCTION outbox_endpoint_changes() CASCADE;
DROP FUNCTION outbox_endpoint_wake() CASCADE;
DROP FUNCTION outbox_endpoint_gone() CASCADE;
DROP FUNCTION outbox_endpoint_feed() CASCADE;
DROP FUNCTION outbox_endpoint_most() CASCADE;
DROP FUNCTION outbox_message_id() CASCADE;
DROP FUNCTION outbox_name_parts(text);

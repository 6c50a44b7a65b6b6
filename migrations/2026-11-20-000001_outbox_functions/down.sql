-- Outboxes made with the functions stay: each is undone by outbox_drop(name), before this. They work
-- without the trigger, too; relays then find messages by polling.
DROP FUNCTION outbox_drop(text);
DROP FUNCTION outbox_create(text);
DROP FUNCTION outbox_wake() CASCADE;
DROP FUNCTION outbox_name_parts(text);

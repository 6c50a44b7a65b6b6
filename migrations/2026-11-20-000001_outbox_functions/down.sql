-- Outboxes made with the functions stay: each is undone by outbox_drop(name), before this.
DROP FUNCTION outbox_drop(text);
DROP FUNCTION outbox_create(text);
DROP FUNCTION outbox_name_parts(text);

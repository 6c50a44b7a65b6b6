-- The first outbox, for the application that needs only one.
SELECT outbox_create('outbox');
SELECT outbox_create_endpoints('outbox');
SELECT outbox_create_feeds('outbox');

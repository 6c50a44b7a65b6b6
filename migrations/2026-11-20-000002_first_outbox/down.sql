SELECT outbox_drop('outbox');

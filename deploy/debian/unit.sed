# Turns deploy/systemd/diesel-outbox.service into the unit of the Debian package: a program in /usr/bin, a permanent user,
# and settings that an administrator edits in a file.
s,/usr/local/bin/,/usr/bin/,
s,^# /etc/systemd/system/,# /usr/lib/systemd/system/,
s,database-url\, readable only by root\.,database-url\, readable by root and diesel-outbox.,
s,^DynamicUser=true$,User=diesel-outbox,
/^Environment=OUTBOX_ADMIN_ADDR=/a\
# These settings override those above.\
EnvironmentFile=-/etc/diesel-outbox/environment

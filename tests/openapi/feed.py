"""Reads a feed to its end, with a client that was generated from the OpenAPI document, and checks what it has read.

Arguments: the folder of the client, the URL of the interface, a token of the feed, the name of the feed, its number of events.
"""

import sys

folder, url, token, feed, count = sys.argv[1:]
sys.path.insert(0, folder)

from client import AuthenticatedClient  # noqa: E402
from client.api.default import read_events  # noqa: E402
from client.models import Problem  # noqa: E402

read, after = [], "begin"
with AuthenticatedClient(base_url=url, token=token) as client:
    while len(read) < int(count):
        answer = read_events.sync_detailed(feed, client=client, after=after, limit=500, wait="20s")
        assert answer.status_code == 200 and answer.parsed, answer
        read += answer.parsed
        after = answer.headers["outbox-feed-next"]
    end = read_events.sync_detailed(feed, client=client, after=after)
    assert end.parsed == [] and end.headers["outbox-feed-next"] == after, end
    restored = read_events.sync(feed, client=client, after="7.00000000-0000-0000-0000-000000000000")
    assert isinstance(restored, Problem) and restored.status == 409, restored
    assert restored.type_.endswith("feed-changed"), restored
    assert restored["last_position"] == int(count), restored

assert [event.position for event in read] == [str(n) for n in range(1, int(count) + 1)]
assert len({event.id for event in read}) == len(read)
assert {event.specversion for event in read} == {"1.0"}
print(f"{len(read)} events, {sum(event.data['n'] for event in read)}")

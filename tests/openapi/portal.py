"""Adds an endpoint, lists it, tests it and recovers it, with a client that was generated from the portal's document.

Arguments: the folder of the client, the URL of the interface, the token, the URL of a receiver.
"""

import sys

folder, url, token, receiver = sys.argv[1:]
sys.path.insert(0, folder)

from client import AuthenticatedClient  # noqa: E402
from client.api.default import add_endpoint, list_endpoints, recover_endpoint, test_endpoint  # noqa: E402
from client.models import Added, Count, EndpointList, Example, Problem, Recovery, Tested, Written  # noqa: E402

with AuthenticatedClient(base_url=url, token=token) as client:
    written = Written(url=receiver, topics=["order.paid"])
    added = add_endpoint.sync(client=client, body=written, idempotency_key="1")
    assert isinstance(added, Added) and added.secret.startswith("whsec_"), added
    again = add_endpoint.sync(client=client, body=written, idempotency_key="1")
    assert isinstance(again, Added) and again.secret is None and again.endpoint == added.endpoint, again
    other = add_endpoint.sync(client=client, body=Written(url=receiver), idempotency_key="1")
    assert isinstance(other, Problem) and other.status == 422, other
    listed = list_endpoints.sync(client=client, limit=10)
    assert isinstance(listed, EndpointList) and listed.data == [added.endpoint], listed
    recovery = Recovery(since="2026-01-31T12:00:00Z")
    recovered = recover_endpoint.sync(added.endpoint.name, client=client, body=recovery)
    assert isinstance(recovered, Count) and recovered.changed == 0, recovered
    tested = test_endpoint.sync(added.endpoint.name, client=client, body=Example(topic="order.paid"))
    assert isinstance(tested, Tested), tested
    print(tested.to_dict())

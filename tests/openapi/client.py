"""Registers an endpoint, lists it and recovers it, with a client that was generated from the OpenAPI document.

Arguments: the folder of the client, the URL of the interface, the token, the URL of a receiver.
"""

import sys

folder, url, token, receiver = sys.argv[1:]
sys.path.insert(0, folder)

from client import AuthenticatedClient  # noqa: E402
from client.api.default import list_endpoints, recover_endpoint, register_endpoint  # noqa: E402
from client.models import Count, EndpointList, Problem, Recovery, RegisteredEndpoint, Registration, Written  # noqa: E402

with AuthenticatedClient(base_url=url, token=token) as client:
    written = Written(url=receiver, topics=["order.*"])
    registration = Registration(name="acme", endpoint=written)
    registered = register_endpoint.sync(client=client, body=registration)
    assert isinstance(registered, RegisteredEndpoint) and registered.endpoint.enabled, registered
    again = register_endpoint.sync(client=client, body=registration)
    assert isinstance(again, Problem) and again.status == 409, again
    listed = list_endpoints.sync(client=client, limit=10)
    assert isinstance(listed, EndpointList), listed
    assert [one.name for one in listed.data] == ["acme"] and listed.next_ is None, listed
    recovery = Recovery(since="1h", why="a test")
    recovered = recover_endpoint.sync("acme", client=client, body=recovery)
    assert isinstance(recovered, Count), recovered
    print(recovered.to_dict())

"""Registers a destination, lists it and recovers it, with a client that was generated from the OpenAPI document.

Arguments: the folder of the client, the URL of the interface, the token, the URL of a receiver.
"""

import sys

folder, url, token, receiver = sys.argv[1:]
sys.path.insert(0, folder)

from client import AuthenticatedClient  # noqa: E402
from client.api.default import list_destinations, recover_destination, register_destination  # noqa: E402
from client.models import Count, DestinationList, Problem, Recovery, Registered, Registration, Written  # noqa: E402

with AuthenticatedClient(base_url=url, token=token) as client:
    written = Written(url=receiver, topics=["order.*"])
    registration = Registration(name="acme", destination=written)
    registered = register_destination.sync(client=client, body=registration)
    assert isinstance(registered, Registered) and registered.destination.enabled, registered
    again = register_destination.sync(client=client, body=registration)
    assert isinstance(again, Problem) and again.status == 409, again
    listed = list_destinations.sync(client=client, limit=10)
    assert isinstance(listed, DestinationList), listed
    assert [one.name for one in listed.data] == ["acme"] and listed.next_ is None, listed
    recovery = Recovery(since="1h", why="a test")
    recovered = recover_destination.sync("acme", client=client, body=recovery)
    assert isinstance(recovered, Count), recovered
    print(recovered.to_dict())

"""From an HTTP request to CloudEvents: is it from whom it says, and what does it say?"""

import json
import re

from asymmetric import PREFIX, PublicKey
from cloudevents.core.bindings.http import (
    HTTPMessage,
    from_binary_event,
    from_structured_event,
)
from cloudevents.core.exceptions import BaseCloudEventException
from standardwebhooks.webhooks import Webhook, WebhookVerificationError


class Refused(Exception):
    """A request that is answered with `status`, for a reason that fits into one line."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


def verifiers(secrets):
    """One for each secret or public key. There are several during a rotation: the old one and the new one."""
    return [
        PublicKey(secret) if secret.startswith(PREFIX) else Webhook(secret)
        for secret in re.split(r"[\s,]+", secrets)
        if secret
    ]


def verify(webhooks, headers, body):
    """Checks the signature, and that it is not older than five minutes, before anything is read.

    The raw bytes are what was signed: JSON that was parsed and written again is another text.
    """
    for webhook in webhooks:
        try:
            webhook.verify(body, headers, json_parse=False)
            return
        except WebhookVerificationError as error:
            reason = str(error)
        except ValueError:
            reason = "Malformed signature"
    raise Refused(401, reason)


def decode(headers, body):
    """The mode of the request, and its events."""
    content_type = headers.get("content-type", "").split(";")[0].strip().lower()
    try:
        document = json.loads(body)
        match content_type:
            case "application/cloudevents-batch+json":
                return "batched", batched(document)
            case "application/cloudevents+json":
                return "structured", [structured(document)]
            case _:
                return "binary", [binary(headers, body)]
    except (BaseCloudEventException, ValueError, TypeError, RecursionError) as error:
        raise Refused(400, str(error)) from error


def batched(documents):
    if not isinstance(documents, list):
        raise ValueError("a batch is a JSON array")
    return [structured(document) for document in documents]


def structured(document):
    # The SDK invents an id where there is none. Then nothing would tell a repeat.
    if not isinstance(document, dict) or not document.get("id"):
        raise ValueError("an event is a JSON object with an id")
    return from_structured_event(HTTPMessage({}, json.dumps(document).encode()))


def binary(headers, body):
    # The signature covers webhook-id and the body, and no header ce-*: the id is certain only
    # where both agree. Choose structured mode where the other attributes have to be certain, too.
    if headers.get("ce-id") != headers["webhook-id"]:
        raise Refused(401, "ce-id is not the webhook-id that was signed")
    return from_binary_event(HTTPMessage(headers, body))

"""Turns an HTTP request into CloudEvents: verifies its sender and decodes its events."""

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
    """A refused request: the status of the response, and the reason in one line."""

    def __init__(self, status, reason):
        super().__init__(reason)
        self.status = status


def verifiers(secrets):
    """One verifier per secret or public key. During a rotation there are several, the old and the new."""
    return [
        PublicKey(secret) if secret.startswith(PREFIX) else Webhook(secret)
        for secret in re.split(r"[\s,]+", secrets)
        if secret
    ]


def verify(webhooks, headers, body):
    """Verifies the signature, and that it is at most five minutes old, before parsing anything.

    The signature covers the raw bytes: JSON that was parsed and serialized again differs.
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
    """Returns the mode of the request and its events."""
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
    # The SDK invents a missing id. Then a repeat could not be recognised.
    if not isinstance(document, dict) or not document.get("id"):
        raise ValueError("an event is a JSON object with an id")
    return from_structured_event(HTTPMessage({}, json.dumps(document).encode()))


def binary(headers, body):
    # The signature covers webhook-id and the body, but no ce-* header, so trust the id only if both agree.
    # Use structured mode if the other attributes must be trustworthy, too.
    if headers.get("ce-id") != headers["webhook-id"]:
        raise Refused(401, "ce-id differs from the signed webhook-id")
    return from_binary_event(HTTPMessage(headers, body))

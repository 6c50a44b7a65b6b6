"""Asymmetric signatures of Standard Webhooks (`v1a`, Ed25519), which the library standardwebhooks does not know yet.

A receiver has the public key alone, `whpk_…`: it verifies what it cannot sign.
"""

import base64
import binascii
import time

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks.webhooks import WebhookVerificationError

PREFIX = "whpk_"
# As the library has it.
TOLERANCE_SECONDS = 300
# Anyone may send signatures, and each costs time.
MOST_SIGNATURES = 16


class PublicKey:
    """Verifies as the library's `Webhook` does."""

    def __init__(self, key):
        self.key = Ed25519PublicKey.from_public_bytes(base64.b64decode(key.removeprefix(PREFIX)))

    def verify(self, body, headers, json_parse=False):
        try:
            id, timestamp = headers["webhook-id"], headers["webhook-timestamp"]
            signatures = headers["webhook-signature"].split()
            seconds = int(timestamp)
        except KeyError:
            raise WebhookVerificationError("Missing required headers") from None
        except ValueError:
            raise WebhookVerificationError("Invalid Signature Headers") from None
        if abs(time.time() - seconds) > TOLERANCE_SECONDS:
            raise WebhookVerificationError("Message timestamp too old or too new")
        signed = f"{id}.{timestamp}.".encode() + body
        ours = [one.removeprefix("v1a,") for one in signatures if one.startswith("v1a,")]
        for signature in ours[:MOST_SIGNATURES]:
            try:
                self.key.verify(base64.b64decode(signature), signed)
                return
            except (InvalidSignature, binascii.Error):
                pass
        raise WebhookVerificationError("No matching signature found")

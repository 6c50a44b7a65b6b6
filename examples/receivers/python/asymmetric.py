"""Asymmetric signatures of Standard Webhooks (`v1a`, Ed25519), which the library standardwebhooks does not support yet.

A receiver has only the public key, `whpk_…`: it can verify signatures but not create them.
"""

import base64
import binascii
import time

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from standardwebhooks.webhooks import WebhookVerificationError

PREFIX = "whpk_"
# The same as in the library.
TOLERANCE_SECONDS = 300
# Anyone can send signatures, and each verification takes time.
MOST_SIGNATURES = 16


class PublicKey:
    """Verifies like `Webhook` of the library."""

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

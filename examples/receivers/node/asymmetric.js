// Asymmetric signatures of Standard Webhooks (`v1a`, Ed25519), which the library standardwebhooks does not support yet.
// A receiver has only the public key, `whpk_…`: it can verify signatures but not create them.
"use strict";

const { createPublicKey, verify } = require("node:crypto");

const PREFIX = "whpk_";
// The same as in the library.
const TOLERANCE_SECONDS = 300;
// Anyone can send signatures, and each verification takes time.
const MOST_SIGNATURES = 16;
// Node reads a public key as this prefix (SubjectPublicKeyInfo of RFC 8410) and the 32 bytes of the key.
const BEFORE_THE_KEY = Buffer.from("302a300506032b6570032100", "hex");

/** Verifies like `Webhook` of the library. */
class PublicKey {
  constructor(text) {
    const bytes = Buffer.from(text.slice(PREFIX.length), "base64");
    if (bytes.length !== 32) throw new TypeError("a public key has 32 bytes");
    const key = Buffer.concat([BEFORE_THE_KEY, bytes]);
    this.key = createPublicKey({ key, format: "der", type: "spki" });
  }

  verify(body, headers) {
    const [id, timestamp, signatures] = ["id", "timestamp", "signature"].map(
      (name) => headers[`webhook-${name}`],
    );
    if (!id || !timestamp || !signatures) throw new Error("Missing required headers");
    const apart = Math.abs(Date.now() / 1000 - Number(timestamp));
    if (!(apart <= TOLERANCE_SECONDS)) throw new Error("Message timestamp too old or too new");
    const signed = Buffer.concat([Buffer.from(`${id}.${timestamp}.`), body]);
    const ours = signatures.split(" ").filter((one) => one.startsWith("v1a,"));
    const isVerified = (one) => verify(null, signed, this.key, Buffer.from(one.slice(4), "base64"));
    if (!ours.slice(0, MOST_SIGNATURES).some(isVerified)) {
      throw new Error("No matching signature found");
    }
  }
}

module.exports = { PREFIX, PublicKey };

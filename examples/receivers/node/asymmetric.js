// Asymmetric signatures of Standard Webhooks (`v1a`, Ed25519), which the library standardwebhooks does not know yet.
// A receiver has the public key alone, `whpk_…`: it verifies what it cannot sign.
"use strict";

const { createPublicKey, verify } = require("node:crypto");

const PREFIX = "whpk_";
// As the library has it.
const TOLERANCE_SECONDS = 300;
// Anyone may send signatures, and each costs time.
const MOST_SIGNATURES = 16;
// How Node reads a public key: this (SubjectPublicKeyInfo of RFC 8410), and the key's 32 bytes.
const BEFORE_THE_KEY = Buffer.from("302a300506032b6570032100", "hex");

/** Verifies as the library's `Webhook` does. */
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

// Turns an HTTP request into CloudEvents: verifies its sender and decodes its events.
"use strict";

const { HTTP } = require("cloudevents");
const { Webhook } = require("standardwebhooks");
const { PREFIX, PublicKey } = require("./asymmetric");

/** A refused request: the status of the response, and the reason in one line. */
class Refused extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

/** One verifier per secret or public key. During a rotation there are several, the old and the new. */
function verifiers(secrets) {
  return secrets
    .split(/[\s,]+/)
    .filter((secret) => secret !== "")
    .map((secret) => (secret.startsWith(PREFIX) ? new PublicKey(secret) : new Webhook(secret)));
}

/**
 * Verifies the signature, and that it is at most five minutes old, before parsing anything.
 *
 * The signature covers the raw bytes: JSON that was parsed and serialized again differs.
 */
function verify(webhooks, headers, body) {
  let reason;
  for (const webhook of webhooks) {
    try {
      webhook.verify(body, headers, { jsonParse: false });
      return;
    } catch (error) {
      reason = error.message;
    }
  }
  throw new Refused(401, reason);
}

/** Returns the mode of the request and its events. */
function decode(headers, body) {
  const contentType = (headers["content-type"] ?? "").split(";")[0].trim().toLowerCase();
  try {
    const document = JSON.parse(body.toString());
    switch (contentType) {
      case "application/cloudevents-batch+json":
        return { mode: "batched", events: batched(document) };
      case "application/cloudevents+json":
        return { mode: "structured", events: [structured(document)] };
      default:
        return { mode: "binary", events: [binary(headers, document)] };
    }
  } catch (error) {
    if (error instanceof Refused) throw error;
    throw new Refused(400, error.message);
  }
}

function batched(documents) {
  if (!Array.isArray(documents)) throw new TypeError("a batch is a JSON array");
  documents.forEach(checkId);
  return HTTP.toEvent({
    headers: { "content-type": "application/cloudevents-batch+json" },
    body: JSON.stringify(documents),
  });
}

function structured(document) {
  checkId(document);
  const event = HTTP.toEvent({
    headers: { "content-type": "application/cloudevents+json" },
    body: document,
  });
  return exact(event, document.data, document.time);
}

// Restores the values as sent: the SDK cuts the time to milliseconds, turns numeric payloads into strings,
// and loses the payloads 0, false and "". The copy is also validated against the specification, which the
// SDK otherwise does only for batches.
function exact(event, data, time) {
  return event.cloneWith({ data, time });
}

// The SDK invents a missing id. Then a repeat could not be recognised.
function checkId(document) {
  if (!document?.id) throw new TypeError("an event is a JSON object with an id");
}

function binary(headers, data) {
  // The signature covers webhook-id and the body, but no ce-* header, so trust the id only if both agree. Use
  // structured mode if the other attributes must be trustworthy, too.
  if (headers["ce-id"] !== headers["webhook-id"]) {
    throw new Refused(401, "ce-id differs from the signed webhook-id");
  }
  // CloudEvents percent-encodes characters outside plain ASCII in headers. The SDK does not decode them.
  const decoded = { ...headers };
  for (const name of Object.keys(headers)) {
    if (name.startsWith("ce-")) decoded[name] = decodeURIComponent(headers[name]);
  }
  return exact(HTTP.toEvent({ headers: decoded, body: "" }), data, decoded["ce-time"]);
}

module.exports = { Refused, verifiers, verify, decode };

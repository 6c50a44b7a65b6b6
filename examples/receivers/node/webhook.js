// From an HTTP request to CloudEvents: is it from whom it says, and what does it say?
"use strict";

const { HTTP } = require("cloudevents");
const { Webhook } = require("standardwebhooks");
const { PREFIX, PublicKey } = require("./asymmetric");

/** A request that is answered with `status`, for a reason that fits into one line. */
class Refused extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

/** One for each secret or public key. There are several during a rotation: the old one and the new one. */
function verifiers(secrets) {
  return secrets
    .split(/[\s,]+/)
    .filter((secret) => secret !== "")
    .map((secret) => (secret.startsWith(PREFIX) ? new PublicKey(secret) : new Webhook(secret)));
}

/**
 * Checks the signature, and that it is not older than five minutes, before anything is read.
 *
 * The raw bytes are what was signed: JSON that was parsed and written again is another text.
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

/** The mode of the request, and its events. */
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

// As it was sent: the SDK cuts the time to milliseconds, makes texts of payloads that are numbers,
// and loses those that are 0, false or "". The copy is also checked against the specification,
// which the SDK does by itself for batches only.
function exact(event, data, time) {
  return event.cloneWith({ data, time });
}

// The SDK invents an id where there is none. Then nothing would tell a repeat.
function checkId(document) {
  if (!document?.id) throw new TypeError("an event is a JSON object with an id");
}

function binary(headers, data) {
  // The signature covers webhook-id and the body, and no header ce-*: the id is certain only
  // where both agree. Choose structured mode where the other attributes have to be certain, too.
  if (headers["ce-id"] !== headers["webhook-id"]) {
    throw new Refused(401, "ce-id is not the webhook-id that was signed");
  }
  // CloudEvents percent-encodes what is not plain ASCII in a header. The SDK does not decode it.
  const decoded = { ...headers };
  for (const name of Object.keys(headers)) {
    if (name.startsWith("ce-")) decoded[name] = decodeURIComponent(headers[name]);
  }
  return exact(HTTP.toEvent({ headers: decoded, body: "" }), data, decoded["ce-time"]);
}

module.exports = { Refused, verifiers, verify, decode };

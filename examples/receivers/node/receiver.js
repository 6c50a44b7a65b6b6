// A receiver of webhooks: verifies, parses, handles each event once, and answers fast.
//
//   WEBHOOK_SECRET   whsec_…, or a public key, whpk_…; several, with white space or commas between,
//                    during a rotation
//   PORT             where to listen on 127.0.0.1; 0 (the default): any free port
//   INBOX            the file that remembers; default inbox.jsonl
//   MAX_BODY_BYTES   a longer body is refused; default 8 MiB
//
// Prints one line of JSON for each event.
"use strict";

const http = require("node:http");

const { Inbox } = require("./inbox");
const { Refused, decode, verifiers, verify } = require("./webhook");

const MAX_BODY_BYTES = Number(process.env.MAX_BODY_BYTES ?? 8 * 1024 * 1024);

// A bad secret, and none at all, must not start: either would refuse all, or let all in.
function secretsOrExit() {
  let webhooks = [];
  try {
    webhooks = verifiers(process.env.WEBHOOK_SECRET ?? "");
  } catch {
    console.error("WEBHOOK_SECRET: not of the form whsec_<base64> or whpk_<base64>");
    process.exit(2);
  }
  if (webhooks.length === 0) {
    console.error("WEBHOOK_SECRET is not set: give it the secret that the relay signs with");
    process.exit(2);
  }
  return webhooks;
}

const webhooks = secretsOrExit();
const inbox = new Inbox(process.env.INBOX ?? "inbox.jsonl");

async function receive(request, response) {
  try {
    const body = await read(request);
    verify(webhooks, request.headers, body);
    const { mode, events } = decode(request.headers, body);
    const news = store(events);
    // What takes longer than the sender waits is done after the answer, from the store.
    response.writeHead(204).end();
    events.forEach((event, index) => {
      show(news[index] ? { ...work(event), mode } : { duplicate: event.id });
    });
  } catch (error) {
    if (request.destroyed && !request.complete) return; // The sender went away.
    // Whatever is not Refused is a bug of ours, and no reason for the sender to give up.
    answer(response, error instanceof Refused ? error.status : 500, error.message);
  }
}

async function read(request) {
  const chunks = [];
  let bytes = 0;
  // A body that is too long is read to its end, but not kept: a sender that still writes would
  // see a broken connection, and not the answer.
  for await (const chunk of request) {
    bytes += chunk.length;
    if (bytes <= MAX_BODY_BYTES) chunks.push(chunk);
  }
  if (bytes > MAX_BODY_BYTES) {
    throw new Refused(413, `the body has more than ${MAX_BODY_BYTES} bytes`);
  }
  return Buffer.concat(chunks);
}

function store(events) {
  try {
    return inbox.handle(events, work);
  } catch (error) {
    // Not the sender's fault: it shall come again.
    throw new Refused(503, `the store: ${error.message}`);
  }
}

function answer(response, status, reason) {
  const line = reason.replace(/\s+/g, " ").slice(0, 500);
  console.error(`${status} ${line}`);
  const headers = { "content-type": "text/plain; charset=utf-8" };
  if (status === 503) headers["retry-after"] = "1";
  response.writeHead(status, headers).end(`${line}\n`);
}

/** What the application does with an event; here it is what the inbox writes down. */
function work({ id, type, source, subject, time, sequence, partitionkey, data, ...others }) {
  const extensions = { ...others };
  // Attributes that CloudEvents itself names. All others are extensions.
  for (const name of ["specversion", "datacontenttype", "dataschema"]) delete extensions[name];
  return { id, type, source, subject, time, sequence, partitionkey, data, extensions };
}

function show(document) {
  console.log(JSON.stringify(document));
}

const server = http.createServer(
  // Node takes 16 KiB of headers; a message can have more.
  { maxHeaderSize: 128 * 1024, requestTimeout: 60_000 },
  receive,
);
// Longer than a sender keeps an idle connection: one that the receiver closes just when the next
// request is sent is a failed attempt. Node's 5 seconds are shorter than that.
server.keepAliveTimeout = 60_000;
server.listen(Number(process.env.PORT ?? 0), "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}/`);
});

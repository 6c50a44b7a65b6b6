// A receiver of webhooks: verifies, parses, handles each event once, and responds fast.
//
//   WEBHOOK_SECRET   a secret, whsec_…, or a public key, whpk_…; during a rotation several, separated
//                    by white space or commas
//   PORT             the port on 127.0.0.1; 0 (the default): any free port
//   INBOX            the file of handled events; defaults to inbox.jsonl
//   MAX_BODY_BYTES   the longest accepted body; defaults to 8 MiB
//
// Prints each event as one line of JSON.
"use strict";

const http = require("node:http");

const { Inbox } = require("./inbox");
const { Refused, decode, verifiers, verify } = require("./webhook");

const MAX_BODY_BYTES = Number(process.env.MAX_BODY_BYTES ?? 8 * 1024 * 1024);

// Do not start with an invalid or missing secret: the receiver would refuse or accept every request.
function secretsOrExit() {
  let webhooks = [];
  try {
    webhooks = verifiers(process.env.WEBHOOK_SECRET ?? "");
  } catch {
    console.error("WEBHOOK_SECRET does not have the form whsec_<base64> or whpk_<base64>");
    process.exit(2);
  }
  if (webhooks.length === 0) {
    console.error("WEBHOOK_SECRET is not set: set it to the secret that the relay signs with");
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
    // Do slow work after the response, from the store: the sender waits only a short time.
    response.writeHead(204).end();
    events.forEach((event, index) => {
      show(news[index] ? { ...work(event), mode } : { duplicate: event.id });
    });
  } catch (error) {
    if (request.destroyed && !request.complete) return; // The sender disconnected.
    // Any error other than Refused is a bug of ours: 500 makes the sender retry.
    answer(response, error instanceof Refused ? error.status : 500, error.message);
  }
}

async function read(request) {
  const chunks = [];
  let bytes = 0;
  // Read an oversized body to its end without keeping it: otherwise a sender that is still writing would see a
  // broken connection instead of the response.
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
    // Not the fault of the sender: 503 makes it retry.
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

/** The work of the application. Here it returns what the inbox stores. */
function work({ id, type, source, subject, time, sequence, partitionkey, data, ...others }) {
  const extensions = { ...others };
  // Attributes defined by CloudEvents. All others are extensions.
  for (const name of ["specversion", "datacontenttype", "dataschema"]) delete extensions[name];
  return { id, type, source, subject, time, sequence, partitionkey, data, extensions };
}

function show(document) {
  console.log(JSON.stringify(document));
}

const server = http.createServer(
  // Node accepts 16 KiB of headers by default; a message can have more.
  { maxHeaderSize: 128 * 1024, requestTimeout: 60_000 },
  receive,
);
// Longer than a sender keeps an idle connection: if the receiver closes it just as the next request is sent, the
// attempt fails. The default of Node, 5 seconds, is too short.
server.keepAliveTimeout = 60_000;
server.listen(Number(process.env.PORT ?? 0), "127.0.0.1", () => {
  console.log(`listening on http://127.0.0.1:${server.address().port}/`);
});

"""A receiver of webhooks: verifies, parses, handles each event once, and responds fast.

    WEBHOOK_SECRET   a secret, whsec_…, or a public key, whpk_…; during a rotation several, separated
                     by white space or commas
    PORT             the port on 127.0.0.1; 0 (the default): any free port
    INBOX            the SQLite file of handled events; defaults to inbox.sqlite
    MAX_BODY_BYTES   the longest accepted body; defaults to 8 MiB

Prints each event as one line of JSON.
"""

import json
import os
import sqlite3
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from inbox import Inbox
from webhook import Refused, decode, verifiers, verify

# Attributes defined by CloudEvents. All others are extensions.
CORE = "specversion id source type time subject datacontenttype dataschema".split()


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    # Seconds without a byte. Longer than a sender keeps an idle connection: if the receiver closes it just
    # as the next request is sent, the attempt fails.
    timeout = 60

    def do_POST(self):
        try:
            body = self.read_body()
            headers = {name.lower(): value for name, value in self.headers.items()}
            verify(self.server.webhooks, headers, body)
            mode, events = decode(headers, body)
            news = self.server.inbox.handle(events, work)
        except Refused as refused:
            self.answer(refused.status, str(refused))
        except sqlite3.Error as error:
            # Not the fault of the sender: 503 makes it retry.
            self.answer(503, f"the store: {error}", retry_after=1)
        except ConnectionError:
            self.close_connection = True
        except Exception as error:
            # Any other error is a bug of ours: 500 makes the sender retry.
            self.answer(500, f"{type(error).__name__}: {error}")
        else:
            # Do slow work after the response, from the store: the sender waits only a short time.
            self.answer(204)
            for event, is_new in zip(events, news):
                show(described(event, mode) if is_new else {"duplicate": event.get_id()})

    def read_body(self):
        length = self.headers.get("content-length", "")
        if not (length.isascii() and length.isdigit()):
            self.close_connection = True
            raise Refused(411, "content-length is missing")
        length = int(length)
        if length > self.server.max_body_bytes:
            # Read an oversized body nevertheless, up to a limit: otherwise a sender that is still writing
            # would see a broken connection instead of the response.
            self.close_connection = True
            left = min(length, 8 * self.server.max_body_bytes)
            while left > 0 and (chunk := self.rfile.read(min(left, 65536))):
                left -= len(chunk)
            raise Refused(413, f"the body has more than {self.server.max_body_bytes} bytes")
        body = self.rfile.read(length)
        if len(body) < length:
            raise ConnectionError("the sender disconnected")
        return body

    def answer(self, status, reason="", retry_after=None):
        reason = " ".join(reason.split())[:500]
        if reason:
            self.log_message("%s", f"{status} {reason}")
        body = f"{reason}\n".encode() if reason else b""
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", str(retry_after))
        if self.close_connection:
            self.send_header("Connection", "close")
        # A 204 response has no body and no content-length.
        if status != 204:
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code="-", size="-"):
        """Only refusals are logged."""

    def log_message(self, form, *values):
        sys.stderr.write(form % values + "\n")


def work(db, event):
    """The work of the application. Here it stores the event. `db` is in the transaction that records
    the id of the event, so its changes happen once."""
    document = json.dumps(described(event, None))
    db.execute("INSERT INTO events (type, event) VALUES (?, ?)", [event.get_type(), document])


def described(event, mode):
    attributes = event.get_attributes()
    extensions = {name: value for name, value in attributes.items() if name not in CORE}
    time = event.get_time()
    found = {
        "id": event.get_id(),
        "type": event.get_type(),
        "source": event.get_source(),
        "subject": event.get_subject(),
        "time": time and time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "sequence": extensions.pop("sequence", None),
        "partitionkey": extensions.pop("partitionkey", None),
        "mode": mode,
    }
    present = {name: value for name, value in found.items() if value is not None}
    return {**present, "data": event.get_data(), "extensions": extensions}


STDOUT = threading.Lock()


def show(document):
    line = json.dumps(document) + "\n"
    with STDOUT:
        sys.stdout.write(line)
        sys.stdout.flush()


class Server(ThreadingHTTPServer):
    # The backlog of connections to accept. The default of 5 is less than a relay opens at once.
    request_queue_size = 128


def main():
    # Do not start with an invalid or missing secret: the receiver would refuse or accept every request.
    try:
        webhooks = verifiers(os.environ.get("WEBHOOK_SECRET", ""))
    except Exception:
        sys.stderr.write("WEBHOOK_SECRET does not have the form whsec_<base64> or whpk_<base64>\n")
        sys.exit(2)
    if not webhooks:
        sys.stderr.write("WEBHOOK_SECRET is not set: set it to the secret that the relay signs with\n")
        sys.exit(2)

    server = Server(("127.0.0.1", int(os.environ.get("PORT", "0"))), Receiver)
    server.webhooks = webhooks
    server.inbox = Inbox(os.environ.get("INBOX", "inbox.sqlite"))
    server.max_body_bytes = int(os.environ.get("MAX_BODY_BYTES", 8 * 1024 * 1024))
    print(f"listening on http://127.0.0.1:{server.server_port}/", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()

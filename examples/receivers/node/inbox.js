// Remembers in a file which events were handled, so that a repeated one is not again.
//
// An application has a database: there the id goes into a table with a unique key, in the
// transaction of the work, as ../python/inbox.py shows it. A file of lines needs nothing beyond
// Node, and one line that holds both the id and the work is as good as a transaction: it is there
// as a whole, or it is cut and does not count. It serves one process.
"use strict";

const fs = require("node:fs");

class Inbox {
  constructor(path) {
    this.path = path;
    this.ids = new Set();
    const text = fs.readFileSync(path, { encoding: "utf8", flag: "a+" });
    const whole = text.slice(0, text.lastIndexOf("\n") + 1);
    // A process that died while it wrote has left the beginning of a line.
    fs.truncateSync(path, Buffer.byteLength(whole));
    for (const line of whole.split("\n")) {
      if (line !== "") this.ids.add(JSON.parse(line).id);
    }
  }

  /**
   * Writes down `work(event)` for each event that is new, and says for each whether it was.
   *
   * Synchronous from beginning to end: two requests with one event come one after the other.
   */
  handle(events, work) {
    const added = new Set();
    // By id alone: it is a UUID, and of a binary event nothing else is signed.
    const news = events.map(({ id }) => {
      const isNew = !this.ids.has(id) && !added.has(id);
      added.add(id);
      return isNew;
    });
    const lines = events
      .filter((_, index) => news[index])
      .map((event) => `${JSON.stringify({ id: event.id, event: work(event) })}\n`);
    if (lines.length > 0) this.append(lines.join(""));
    // Only now: what could not be written is new when it comes again.
    added.forEach((id) => this.ids.add(id));
    return news;
  }

  append(text) {
    const file = fs.openSync(this.path, "a");
    try {
      const { size } = fs.fstatSync(file);
      try {
        fs.writeFileSync(file, text);
        fs.fsyncSync(file);
      } catch (error) {
        // A part of it may have been written, to a full disk for example.
        fs.ftruncateSync(file, size);
        throw error;
      }
    } finally {
      fs.closeSync(file);
    }
  }
}

module.exports = { Inbox };

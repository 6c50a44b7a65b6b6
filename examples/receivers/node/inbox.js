// Records handled events in a file, so that a repeated event is not handled again.
//
// An application uses its database instead: it inserts the id into a table with a unique key, in the
// transaction of the work, as ../python/inbox.py does. A file needs nothing beyond Node. One line holds
// both the id and the work, which makes it atomic: a line that was cut off is ignored. The file serves
// only one process.
"use strict";

const fs = require("node:fs");

class Inbox {
  constructor(path) {
    this.path = path;
    this.ids = new Set();
    const text = fs.readFileSync(path, { encoding: "utf8", flag: "a+" });
    const whole = text.slice(0, text.lastIndexOf("\n") + 1);
    // A process that crashed while writing leaves an incomplete last line.
    fs.truncateSync(path, Buffer.byteLength(whole));
    for (const line of whole.split("\n")) {
      if (line !== "") this.ids.add(JSON.parse(line).id);
    }
  }

  /**
   * Stores `work(event)` for each new event. Returns for each event whether it was new.
   *
   * The function is synchronous, so two requests with the same event cannot overlap.
   */
  handle(events, work) {
    const added = new Set();
    // The id alone is enough: it is a UUID, and the only signed attribute of a binary event.
    const news = events.map(({ id }) => {
      const isNew = !this.ids.has(id) && !added.has(id);
      added.add(id);
      return isNew;
    });
    const lines = events
      .filter((_, index) => news[index])
      .map((event) => `${JSON.stringify({ id: event.id, event: work(event) })}\n`);
    if (lines.length > 0) this.append(lines.join(""));
    // Remember the ids only after the write: if the write fails, a repeat is new.
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
        // Remove a partial write, for example on a full disk.
        fs.ftruncateSync(file, size);
        throw error;
      }
    } finally {
      fs.closeSync(file);
    }
  }
}

module.exports = { Inbox };

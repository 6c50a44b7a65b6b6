// A browser with an empty profile. Whatever a scenario does, four things are failures: an error on the console, a
// violation of the page's policy, a dialog, and a request to another host.

import { createRequire } from "node:module";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import assert from "node:assert/strict";

const ARGUMENTS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];

/** What the test that started this says: addresses, folders, names. */
export const told = JSON.parse(process.env.BROWSER_TEST);

// scripts/install-browser installs the package in the build folder, not next to this file.
const installed = createRequire(path.join(told.packages, "package.json"));
const { chromium } = installed("playwright-core");
const axe = installed("axe-core").source;

/** What no page may cause, and did. */
const offences = [];
/** Answers that a scenario asks for, such as 404. */
const expectedStatuses = new Set();

export const expectStatus = (status) => expectedStatuses.add(String(status));

const watch = (page) => {
  page.on("pageerror", (error) => offences.push(`an error of a script: ${error.message}`));
  page.on("dialog", (dialog) => {
    offences.push(`a dialog: ${dialog.message()}`);
    dialog.dismiss();
  });
  page.on("console", (message) => {
    const text = message.text();
    const status = /status of (\d+)/.exec(text)?.[1];
    if (expectedStatuses.has(status) || expectedStatuses.has(text)) return;
    if (message.type() === "error" || message.type() === "warning") {
      offences.push(`on the console of ${page.url()}: ${text}`);
    }
  });
  page.on("request", (request) => {
    if (new URL(request.url()).origin !== told.origin) {
      offences.push(`a request to somebody else: ${request.url()}`);
    }
  });
};

/** Runs a scenario with a way to open windows, and fails for any offence. */
export const inBrowser = async (scenario) => {
  const profile = fs.mkdtempSync(path.join(os.tmpdir(), "outbox-browser-"));
  const contexts = [];
  try {
    const open = async (settings = {}) => {
      const folder = path.join(profile, String(contexts.length));
      const context = await chromium.launchPersistentContext(folder, {
        executablePath: told.browser,
        headless: true,
        args: ARGUMENTS,
        viewport: { width: 1280, height: 800 },
        timezoneId: "UTC",
        locale: "en",
        ...settings,
      });
      contexts.push(context);
      context.setDefaultTimeout(20_000);
      const [page] = context.pages();
      watch(page);
      context.on("page", watch);
      return page;
    };
    await scenario(open);
    assert.deepEqual(offences, []);
  } finally {
    for (const context of contexts) await context.close();
    fs.rmSync(profile, { recursive: true, force: true });
  }
};

/** Goes to a page of the server and returns its answer's status. */
export const visit = async (page, where) => {
  const answer = await page.goto(told.origin + where);
  return answer.status();
};

/** Presses a button that leads to another page, and returns that page's status. */
export const press = async (page, name) => {
  const [answer] = await Promise.all([
    page.waitForNavigation(),
    page.getByRole("button", { name, exact: true }).first().click(),
  ]);
  return answer.status();
};

/** What axe finds on the page: barriers for people who use a screen reader, a keyboard, or see less. */
export const barriers = async (page) => {
  await page.evaluate(axe);
  const { violations, passes } = await page.evaluate(() => globalThis.axe.run({ resultTypes: ["violations"] }));
  assert.notEqual(passes.length, 0, "axe has checked the page");
  return violations.flatMap(({ id, impact, nodes }) => nodes.map((node) => `${impact}: ${id}: ${node.html}`));
};

/** Writes an image of the page. Chromium without a graphics card now and then has none to give. */
export const photograph = async (page, file, settings = {}) => {
  for (let tries = 1; ; tries += 1) {
    try {
      await page.screenshot({ path: file, ...settings });
      return;
    } catch (error) {
      if (tries === 3 || !error.message.includes("Unable to capture screenshot")) throw error;
    }
  }
};

/** Waits until the page says this somewhere in its content. */
export const says = (page, words) =>
  page.waitForFunction(
    (words) => document.body.innerText.replace(/\s+/g, " ").includes(words),
    words,
  );

// What an operator does on the admin page: one function of a browser for each task.

import assert from "node:assert/strict";
import path from "node:path";

import { audit, byKeyboard, nameless } from "./looks.mjs";
import { barriers, expectStatus, inBrowser, photograph, press, says, told, visit } from "./ground.mjs";

const PAGES = ["/", "/dead", `/dead/${told.letter}`, `/messages?q=${told.letter}`, "/messages", "/ledger", "/keys", "/keys?key=order-7", "/endpoints", "/endpoints?name=acme", "/endpoints/edit", "/endpoints/edit?name=acme", "/endpoints?q=customer-9", "/messages?topic=webhook.1", "/topics", "/relays", "/audit", "/tenant?tenant=00000000-0000-0000-0000-000000000001"];

/** A page, or where the button there leads. */
const LOOKS = [
  ...PAGES.map((where) => [where]),
  ["/dead/2000001"],
  ["/ledger?status=no_subscriber"],
  [`/messages?q=${told.waits}`],
  [`/messages?destination=${told.long}`],
  [`/endpoints?q=${told.long?.slice(0, -2)}`],
  [`/endpoints?name=${told.long}`],
  [`/endpoints/edit?name=${told.long}`],
  [`/endpoints?name=${told.long}`, "Remove…"],
  [`/tenant?tenant=${told.tenant}`],
  ["/dead", "Discard all matching…"],
  ["/dead", "Requeue all matching…"],
  ["/messages?topic=webhook.1", "Retry…"],
  ["/messages?topic=webhook.1", "Cancel…"],
  ["/dead?reason=nonsense"],
  ["/endpoints?name=acme", "Send a test event"],
  ["/endpoints?name=acme", "Recover…"],
  ["/endpoints?name=acme", "Backfill…"],
  ["/endpoints?name=acme", "New secret"],
  ["/endpoints?name=acme", "Remove…"],
  ["/nowhere"],
];

const PORTAL = [
  ["/"],
  ["/endpoints/new"],
  ["/endpoint?name=orders"],
  ["/endpoint?name=stock"],
  ["/endpoint?name=archive"],
  ["/endpoint/edit?name=orders"],
  ["/endpoint?name=archive", "Enable"],
  ["/endpoint?name=archive", "Disable"],
  ["/endpoint?name=orders", "Send an example"],
  ["/endpoint?name=orders", "New secret"],
  ["/endpoint?name=e500"],
  ["/?after=e500"],
  ["/deliveries"],
  ["/deliveries?since=yesterday"],
  ["/deliveries?name=stock&state=dead"],
  [`/delivery?name=orders&id=${told.delivered}`],
  [`/delivery?name=stock&id=${told.dead}`],
  [`/endpoint?name=${told.long}`],
  [`/endpoint/edit?name=${told.long}`],
  [`/deliveries?name=${told.long}`],
  [`/delivery?name=${told.long}&id=${told.waits}`],
  [`/delivery?name=${told.long}&id=${told.untried}`],
  ["/nowhere"],
  ["/open?token=wrong"],
];

/** Pages in both colour schemes, wide and narrow: readable, without barriers, and nothing sticks out. */
const look = async (open, looks, { images = [], schemes = ["light", "dark"], widths = [1280, 360], ...settings } = {}) => {
  for (const status of [400, 401, 403, 404, 422]) expectStatus(status);
  const paths = looks.map(([where]) => where.split("?")[0]);
  for (const path of told.pages ?? []) assert.ok(paths.includes(path), `${path} is looked at`);
  for (const colorScheme of schemes) {
    for (const width of widths) {
      const isPhone = width === 360;
      const page = await open({
        colorScheme,
        viewport: { width, height: 844 },
        hasTouch: isPhone,
        isMobile: isPhone,
        ...settings,
      });
      for (const [where, button] of looks) {
        await visit(page, where);
        if (button) await press(page, button);
        const faults = await page.evaluate(audit, isPhone);
        // Phones get the same elements, and axe takes a second for each page.
        if (!isPhone) faults.push(...(await barriers(page)));
        if (!isPhone && colorScheme === "light") faults.push(...(await nameless(page)), ...(await byKeyboard(page)));
        assert.deepEqual(faults, [], `${where} ${button ?? ""}, ${colorScheme}, ${width} px`);
      }
      for (const [name, where] of images) {
        await visit(page, where);
        const file = path.join(told.screenshots, `${name}-${colorScheme}-${width}.png`);
        await photograph(page, file, { fullPage: true });
      }
    }
  }
};

/** Images for the documents. */
const photographs = async (open, images) => {
  for (const [name, colorScheme, width, height, where] of images) {
    const page = await open({
      colorScheme,
      viewport: { width, height },
      hasTouch: width === 390,
      isMobile: width === 390,
    });
    await visit(page, where);
    await photograph(page, path.join(told.images, `${name}.png`));
  }
};

/** Presses Tab until the focus is on something with this name, and its outline is seen. */
const tabTo = async (page, name) => {
  const seen = [];
  for (let presses = 0; presses < 120; presses += 1) {
    await page.keyboard.press("Tab");
    const at = await page.evaluate(() => {
      const active = document.activeElement;
      const label = active.getAttribute("aria-label") ?? active.labels?.[0]?.innerText ?? active.textContent;
      return { name: label.replace(/\s+/g, " ").trim(), outline: getComputedStyle(active).outlineStyle };
    });
    seen.push(at.name);
    if (at.name === name) {
      assert.notEqual(at.outline, "none", `the focus on ${name} is seen`);
      return;
    }
  }
  assert.fail(`the keyboard does not reach ${name}, but ${seen.join(" | ")}`);
};

const scenarios = {
  /** A dead letter is found, opened, requeued and delivered. */
  requeue: async (open) => {
    const page = await open();
    await visit(page, "/");
    await says(page, "1 dead letter needs review.");
    await page.getByRole("navigation").getByRole("link", { name: "Dead letters" }).click();
    await page.getByLabel("Topic", { exact: true }).fill("order.paid");
    await page.getByLabel("Reason").selectOption("REJECTED");
    await page.getByRole("button", { name: "Filter" }).click();
    await page.getByRole("link", { name: `#${told.letter}` }).click();
    await says(page, "the receiver returned 422");
    const payload = await page.getByRole("region", { name: "Payload, JSON" }).innerText();
    assert.match(payload, /"customer": ‹string, 3 characters›/);
    assert.ok(!(await page.content()).includes("Ada"), "the payload is masked");
    await page.getByRole("button", { name: "Requeue" }).click();
    await says(page, "1 dead letter was requeued.");
    // The page refreshes until the message is delivered.
    await says(page, "Delivered");
    assert.ok(!page.url().includes("done="), "the address has lost the notice");
  },

  pause: async (open) => {
    const page = await open();
    await visit(page, "/");
    const row = page.getByRole("row").filter({ hasText: "billing" });
    await row.getByText("Pause").first().click();
    await row.getByLabel("Why").fill("upgrade of billing");
    await row.getByLabel("For how long").fill("soon");
    expectStatus(400);
    await row.getByRole("button", { name: "Pause billing" }).click();
    await says(page, 'is not a duration such as 500ms or 2h');
    await page.goBack();
    const again = page.getByRole("row").filter({ hasText: "billing" });
    if (!(await again.getByLabel("Why").isVisible())) await again.getByText("Pause").first().click();
    await again.getByLabel("Why").fill("upgrade of billing");
    await again.getByLabel("For how long").fill("2h");
    await again.getByRole("button", { name: "Pause billing" }).click();
    await says(page, "Paused. Relays notice within a second.");
    await says(page, "The destination billing is paused for another 2 h: upgrade of billing");
  },

  resume: async (open) => {
    const page = await open();
    await visit(page, "/");
    await page.getByRole("button", { name: "Resume billing" }).click();
    await says(page, "Resumed.");
    assert.ok(!(await page.innerText("main")).includes("upgrade of billing"));
  },

  /** The token is refused and accepted. */
  token: async (open) => {
    const page = await open();
    expectStatus(401);
    await visit(page, "/dead?topic=order.paid");
    await page.getByLabel("Token").fill("a-token-that-is-not-the-right-one");
    await page.getByRole("button", { name: "Log in" }).click();
    await says(page, "wrong token");
    await page.getByLabel("Token").fill(told.token);
    await page.getByLabel("Your name").fill("Ann <b>");
    await page.getByRole("button", { name: "Log in" }).click();
    await says(page, "Logged in as Ann <b>");
    assert.ok(page.url().endsWith("/dead?topic=order.paid"), page.url());
    assert.equal(await page.evaluate(() => document.cookie), "", "scripts cannot read the cookie");
    await page.getByRole("button", { name: "Log out" }).click();
    await page.getByLabel("Token").waitFor();
    await visit(page, "/");
    assert.ok(page.url().includes("/login"), page.url());
  },

  /** HTML in everything that comes from elsewhere is text. */
  hostile: async (open) => {
    const page = await open();
    let texts = "";
    for (const where of [...PAGES, `/dead?topic=${encodeURIComponent(told.hostile)}`, `/messages?q=${encodeURIComponent(told.hostile)}`, `/keys?key=${encodeURIComponent(told.hostile)}`, `/ledger?topic=${encodeURIComponent(told.hostile)}`, `/endpoints?name=${encodeURIComponent(told.hostile)}`]) {
      assert.equal(await visit(page, where), 200, where);
      texts += await page.innerText("main");
      const made = await page.evaluate(() => ({
        elements: document.querySelectorAll("main img, main script, main iframe, main b, main style").length,
        was: window.hacked === true,
      }));
      assert.deepEqual(made, { elements: 0, was: false }, where);
    }
    // HTML in the topic, the error, the response, the payload, the key, the relay's name and so on.
    for (const mark of ["topic", "error", "response", "payload", "ordering", "relay", "pause", "description", "why"]) {
      const shown = new RegExp(`<img[ /]src=x[ /]onerror=\\\\?"window.hacked=true\\\\?"[ /]class=${mark}>`);
      assert.match(texts, shown);
    }
    // The requested address is itself a script.
    expectStatus(404);
    assert.equal(await visit(page, "/%3Cscript%3Ewindow.hacked=true%3C/script%3E"), 404);
    expectStatus(400);
    await visit(page, `/dead?reason=${encodeURIComponent(told.hostile)}`);
    assert.equal(await page.evaluate(() => window.hacked === true), false);
  },

  /** Nothing but the keyboard. */
  keyboard: async (open) => {
    const page = await open();
    await visit(page, "/");
    await page.keyboard.press("Tab");
    assert.equal(await page.evaluate(() => document.activeElement.className), "skip");
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate(() => document.activeElement.id), "main");
    await visit(page, "/");
    await tabTo(page, "Dead letters");
    await page.keyboard.press("Enter");
    await page.waitForURL("**/dead");
    await tabTo(page, `Select dead letter ${told.letter}`);
    await page.keyboard.press("Space");
    await tabTo(page, "Discard selected");
    await page.keyboard.press("Enter");
    await says(page, "Discard 1 dead letter?");
    await tabTo(page, "No, go back");
    await page.keyboard.press("Enter");
    await page.waitForURL("**/dead");
    await tabTo(page, `Select dead letter ${told.letter}`);
    await page.keyboard.press("Space");
    await tabTo(page, "Requeue selected");
    await page.keyboard.press("Enter");
    await says(page, "1 dead letter was requeued");
    await visit(page, "/");
    await tabTo(page, "Pause billing…");
    await page.keyboard.press("Enter");
    await tabTo(page, "Why");
    await page.keyboard.type("by hand");
    await page.keyboard.press("Enter");
    await says(page, "Paused.");
    await tabTo(page, "Resume billing");
    await page.keyboard.press("Enter");
    await says(page, "Resumed.");
  },

  /** Without script all of it works. */
  noscript: async (open) => {
    const page = await open({ javaScriptEnabled: false });
    await visit(page, "/");
    await page.getByRole("navigation").getByRole("link", { name: "Dead letters" }).click();
    assert.equal(await page.getByText("Pause refreshing").isVisible(), false);
    await page.getByRole("link", { name: `#${told.letter}` }).first().click();
    await page.getByRole("button", { name: "Discard…" }).click();
    assert.match(await page.innerText("h1"), /Discard 1 dead letter\?/);
    await page.getByRole("link", { name: "No, go back" }).click();
    await page.getByRole("button", { name: "Requeue" }).click();
    assert.match(await page.innerText("[data-notice]"), /1 dead letter was requeued/);
    await visit(page, "/");
    await page.getByText("Pause a topic or destination by name…").click();
    await page.getByLabel("Name", { exact: true }).fill("order.late");
    await page.locator("form").filter({ has: page.getByLabel("Name", { exact: true }) }).getByRole("button").click();
    assert.match(await page.innerText("main"), /topic order\.late is paused until resumed/);
    await page.getByRole("button", { name: "Resume order.late" }).click();
    assert.match(await page.innerText("[data-notice]"), /Resumed/);
    // The requeued messages are dead-lettered again; without script the page does not refresh.
    const discard = page.getByRole("button", { name: "Discard all matching…" });
    do await visit(page, "/dead");
    while ((await discard.count()) === 0);
    await discard.click();
    assert.match(await page.innerText("h1"), /Discard \d dead letters?\?/);
    await page.getByRole("button", { name: /^Discard \d/ }).click();
    assert.match(await page.innerText("main"), /No dead letters/);
  },

  /** The page is as it is now, stands still for whoever works in it, and says when it is not. */
  refresh: async (open) => {
    const page = await open();
    await visit(page, "/dead");
    const read = () => page.evaluate(() => document.getElementById("as-of").textContent.slice(0, 14));
    const isReadAgain = async () => {
      const before = await read();
      await page.waitForFunction(
        (before) => !document.getElementById("as-of").textContent.startsWith(before),
        before,
      );
    };
    const staysFor = async (milliseconds) => {
      let asked = 0;
      const count = () => { asked += 1; };
      page.on("request", count);
      await page.waitForTimeout(milliseconds);
      page.off("request", count);
      assert.equal(asked, 0);
    };
    await isReadAgain();
    const letters = page.getByRole("checkbox", { name: /^Select dead letter/ });
    await page.getByLabel("Select all on this page").check();
    assert.equal(await letters.and(page.locator(":checked")).count(), await letters.count());
    await staysFor(4000);
    await page.getByLabel("Select all on this page").uncheck();
    assert.equal(await letters.and(page.locator(":checked")).count(), 0);
    await page.getByLabel("Topic", { exact: true }).fill("half a wor");
    await staysFor(4000);
    assert.equal(await page.getByLabel("Topic", { exact: true }).inputValue(), "half a wor");
    await page.getByRole("button", { name: "Pause refreshing" }).click();
    await staysFor(4000);
    await page.getByRole("button", { name: "Refreshing is paused" }).click();
    await isReadAgain();
    expectStatus("Failed to load resource: net::ERR_FAILED");
    await page.route("**/dead", (route) => route.abort());
    await says(page, "cannot reach the server");
    await page.unroute("**/dead");
    await page.waitForFunction(() => document.getElementById("reach").textContent === "");
  },

  /** Whoever may only look finds nothing to press. */
  readonly: async (open) => {
    const page = await open();
    // Whose form is refused is a text, not a page.
    for (const where of PAGES.filter((where) => !where.startsWith("/endpoints/edit"))) {
      await visit(page, where);
      assert.equal(await page.locator('form[method="post"], input[type="checkbox"]').count(), 0, where);
      await says(page, "Read-only: changes are disabled.");
    }
  },

  looks: (open) => look(open, LOOKS, { images: [["overview", "/"], ["dead", "/dead"], ["letter", `/dead/${told.letter}`]] }),

  login: (open) => look(open, [["/login"]]),

  /** What is wrong with a page is found. */
  faults: async (open) => {
    const page = await open();
    await visit(page, "/");
    assert.deepEqual([...(await nameless(page)), ...(await byKeyboard(page))], []);
    await page.evaluate(() => {
      const link = document.createElement("a");
      Object.assign(link, { href: "/", tabIndex: -1, textContent: "unreached" });
      document.querySelector("main").append(link, document.createElement("button"));
    });
    const faults = [...(await nameless(page)), ...(await byKeyboard(page))].join();
    assert.match(faults, /a button has no name.*the keyboard does not reach <a href="\/" tabindex="-1">/);
  },

  portal: (open) => look(open, PORTAL),

  "portal-german": async (open) => {
    // Its words are longer.
    await look(open, PORTAL.filter(([, button]) => !button), { schemes: ["light"], widths: [360], locale: "de" });
    const page = await open({ locale: "de" });
    await visit(page, "/");
    assert.equal(await page.evaluate(() => document.documentElement.lang), "de");
    await says(page, "Endpunkt hinzufügen");
  },

  /** An endpoint is added, disabled and removed with nothing but the keyboard, without script. */
  "portal-keyboard": async (open) => {
    const page = await open({ javaScriptEnabled: false });
    await visit(page, "/");
    const use = async (name, ...keys) => {
      await tabTo(page, name);
      for (const key of keys) await (key.length > 10 ? page.keyboard.type(key) : page.keyboard.press(key));
    };
    const arrives = (words) => page.getByText(words).first().waitFor();
    await use("Add an endpoint", "Enter");
    await page.waitForURL("**/endpoints/new");
    await use("URL", "https://hooks.acme.example/by-keyboard");
    await use("Save", "Enter");
    await arrives("Copy the secret now");
    await use("Back", "Enter");
    await page.waitForURL("**/endpoint?name=*");
    await use("Disable", "Enter");
    await arrives("The endpoint was disabled here");
    await use("Enable", "Enter");
    await arrives("Enabled.");
    await use("Remove…", "Enter");
    await arrives("Events that wait for this endpoint: 0.");
    await use("I know that events waiting for this endpoint are given up and that its secret is deleted", "Space");
    await use("Remove", "Enter");
    await arrives("Removed.");
  },

  readme: (open) => photographs(open, [
    ["admin-overview", "light", 1280, 900, "/"],
    ["admin-dead-letter", "dark", 1280, 900, `/dead/${told.letter}`],
    ["admin-phone", "dark", 390, 844, "/"],
  ]),

  "portal-images": (open) => photographs(open, [
    ["portal-endpoints", "light", 1280, 480, "/"],
    ["portal-endpoint", "light", 1280, 900, "/endpoint?name=orders"],
    ["portal-delivery", "dark", 1280, 900, `/delivery?name=stock&id=${told.dead}`],
  ]),
};

await inBrowser(scenarios[process.argv[2]]);

// What a page's layout and colours show when measured in the page itself.

/** Faults of the page as shown: too wide, too little contrast, too small to click, without a name, or hard to read. */
export const audit = (isPhone) => {
  // What a person stumbles over.
  const readingFaults = () => {
    const faults = [];
    const lines = (node, from, to) => {
      const range = document.createRange();
      range.setStart(node, from);
      range.setEnd(node, to);
      return new Set([...range.getClientRects()].filter((box) => box.width > 0).map((box) => Math.round(box.top / 8))).size;
    };
    // Times, sequences and codes, such as 2026-01-31 12:00:00 UTC, 3 min 20 s, #17 and SERVER_ERROR, are not broken.
    const whole = /\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?( UTC|Z)?|#\d+|\b[A-Z]+(_[A-Z]+)+\b/g;
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const node = texts.currentNode;
      const element = node.parentElement;
      if (element.closest("pre, textarea, option, code") || !element.checkVisibility()) continue;
      const isShort = element.closest("time, .short, td.number, .badge") !== null;
      for (const { 0: text, index } of node.textContent.matchAll(isShort ? /\S.*/g : whole)) {
        if (lines(node, index, index + text.length) > 1) faults.push(`${text} is broken in ${element.parentElement.outerHTML.slice(0, 200)}`);
      }
    }
    // A text of several lines has most of the width of its card.
    for (const cell of document.querySelectorAll("td")) {
      const box = cell.firstElementChild.getBoundingClientRect();
      const row = cell.parentElement.getBoundingClientRect();
      if (isPhone && box.height > 50 && box.width < 0.5 * row.width) faults.push(`a narrow column: ${cell.textContent.trim().slice(0, 60)}`);
    }
    for (const title of document.querySelectorAll("h1, h1 *")) {
      const size = parseFloat(getComputedStyle(title).fontSize);
      if (title.textContent.trim() && size < 17) faults.push(`the title ${title.textContent.trim().slice(0, 60)} has ${size} px`);
    }
    for (const panel of document.querySelectorAll(".panel:has(form[method=post])")) {
      if (!panel.querySelector("h1, h2")) faults.push(`a panel with acts has no title: ${panel.textContent.trim().slice(0, 60)}`);
    }
    const twice = /\b([a-z_]{4,})\s+\1\b/i.exec([...document.querySelectorAll("td")].map((cell) => cell.innerText).join("; "));
    if (twice) faults.push(`twice: ${twice[0]}`);
    // A UUID tells nothing. A link leads to more.
    const uuid = /[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/;
    if (document.querySelector("#lanes")) {
      const bare = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
      while (bare.nextNode()) {
        const { textContent, parentElement } = bare.currentNode;
        const isMeant = parentElement.closest("a, .unseen, [aria-labelledby=relays]") || /^(Ordering key|The tenant) /.test(textContent);
        if (uuid.test(textContent) && !isMeant) faults.push(`a bare UUID: ${textContent.trim()}`);
      }
    }
    return faults;
  };

  const faults = [];
  const name = (element) => `${element.tagName.toLowerCase()} "${element.textContent.trim().slice(0, 40)}"`;
  const isSeen = (element) => {
    const box = element.getBoundingClientRect();
    return box.width > 1 && box.height > 1 && getComputedStyle(element).visibility === "visible" && element.checkVisibility();
  };

  if (document.documentElement.scrollWidth > innerWidth) {
    faults.push(`the page is ${document.documentElement.scrollWidth} px wide`);
  }
  if (document.querySelectorAll("h1").length !== 1) faults.push("it has not one heading");
  if (document.querySelectorAll("main").length !== 1) faults.push("it has not one main part");
  if (document.querySelector("[style]")) faults.push("it has a style of its own somewhere");
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) faults.push(`ids are used twice: ${ids}`);
  for (const control of document.querySelectorAll("input:not([type=hidden]), select")) {
    if (!control.labels?.length && !control.getAttribute("aria-label")) faults.push(`${control.outerHTML} has no label`);
  }
  for (const element of document.querySelectorAll("a, button")) {
    if (!element.textContent.trim() && !element.getAttribute("aria-label")) faults.push(`${element.outerHTML} has no name`);
  }
  if (isPhone) {
    for (const element of document.querySelectorAll("button, .button, select, summary, nav a, input:not([type=hidden], [type=checkbox], [type=radio]), label:has(> input[type=radio])")) {
      const height = element.getBoundingClientRect().height;
      if (isSeen(element) && height < 43.5) faults.push(`${name(element)} is ${height} px high`);
    }
  }

  faults.push(...readingFaults());

  // WCAG 2 contrast: at least 4.5, or 3 for large letters.
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const pixel = (...colours) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
    }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((part) => {
      const c = part / 255;
      return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const grounds = (element) => {
    const found = [];
    for (let at = element; at; at = at.parentElement) found.unshift(getComputedStyle(at).backgroundColor);
    return found;
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const measured = new Set();
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement;
    if (!texts.currentNode.textContent.trim() || measured.has(element) || !isSeen(element)) continue;
    measured.add(element);
    const style = getComputedStyle(element);
    const behind = grounds(element);
    const [one, other] = [light(pixel(...behind, style.color)), light(pixel(...behind))];
    const contrast = (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05);
    const size = parseFloat(style.fontSize);
    const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
    if (contrast < (isLarge ? 3 : 4.5)) faults.push(`${name(element)} has a contrast of ${contrast.toFixed(2)}`);
  }
  return faults;
};

/** What the keyboard does not reach or does not show, of all that the page lets somebody do. */
export const byKeyboard = async (page) => {
  let left = await page.evaluate(() => {
    // Refreshing replaces the links that are being counted.
    document.querySelector("#hold:not([hidden], [aria-pressed=true])")?.click();
    const usable = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']";
    // Of a group of radio buttons, Tab reaches the chosen one, and arrows lead to the others.
    const byArrows = (one) => one.type === "radio" && !one.checked && document.querySelector(`input[name="${one.name}"]:checked`);
    const meant = (one) => !one.disabled && one.checkVisibility() && !byArrows(one);
    globalThis.usable = new Set([...document.querySelectorAll(usable)].filter(meant));
    globalThis.unseen = [];
    document.activeElement.blur();
    document.addEventListener("focusin", ({ target }) => {
      if (globalThis.usable.delete(target) && getComputedStyle(target).outlineStyle === "none") globalThis.unseen.push(target.outerHTML);
    });
    return globalThis.usable.size;
  });
  // A field for a time has several stops.
  for (let most = 10 * left + 10; most > 0 && left > 0; ) {
    const presses = left + 1;
    for (let pressed = 0; pressed < presses; pressed += 1) await page.keyboard.press("Tab");
    most -= presses;
    left = await page.evaluate(() => globalThis.usable.size);
  }
  return page.evaluate(() => [
    ...[...globalThis.usable].map((one) => `the keyboard does not reach ${one.outerHTML}`),
    ...globalThis.unseen.map((html) => `the focus is not seen on ${html}`),
  ]);
};

const NAMED = ["link", "button", "textbox", "searchbox", "combobox", "checkbox", "spinbutton", "DateTime", "DisclosureTriangle", "table", "columnheader", "image", "img", "region", "navigation", "search", "heading"];

/** What has no name for a screen reader, as the browser computes names. */
export const nameless = async (page) => {
  const tree = await page.context().newCDPSession(page);
  const { nodes } = await tree.send("Accessibility.getFullAXTree");
  await tree.detach();
  const shown = nodes.filter((node) => !node.ignored && NAMED.includes(node.role?.value));
  const without = shown.filter((node) => !node.name?.value?.trim());
  return [
    ...(shown.length === 0 ? ["nothing has a name"] : []),
    ...without.map((node) => `a ${node.role.value} has no name`),
  ];
};

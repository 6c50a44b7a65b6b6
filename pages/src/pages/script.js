// Refreshes the page every few seconds while it is visible and not in use. The script is optional: without it,
// the page shows the state of its last load.
"use strict";

(() => {
  const PERIOD_MS = 3000;
  const PATIENCE_MS = 10000;

  const stripNotice = () => {
    const address = new URL(location.href);
    if (!address.searchParams.has("done")) return;
    address.searchParams.delete("done");
    address.searchParams.delete("count");
    history.replaceState(null, "", address);
  };

  // The box that selects all rows works only with this script, so it is hidden without it.
  const showChooser = () => {
    for (const chooser of document.querySelectorAll("[data-all]")) chooser.closest("label").hidden = false;
  };
  document.addEventListener("change", ({ target }) => {
    if (!target.matches("[data-all]")) return;
    for (const box of target.form.querySelectorAll('input[name="letter"]')) box.checked = target.checked;
  });
  showChooser();
  stripNotice();

  const asOf = document.getElementById("as-of");
  if (!asOf || !asOf.hasAttribute("data-live")) return;
  const reach = document.getElementById("reach");
  const hold = document.getElementById("hold");
  let loaded = Date.now();
  let read = asOf.textContent;
  let isHeld = false;
  let isReading = false;
  let isLive = true;

  const say = (words) => {
    // Screen readers announce every change, so change the text only if it differs.
    if (reach.textContent !== words) reach.textContent = words;
  };

  const isInUse = () => {
    const main = document.getElementById("main");
    const active = document.activeElement;
    const isTyping = main.contains(active) && active.matches("input, select, textarea");
    const selection = document.getSelection();
    return (
      isTyping ||
      (selection && !selection.isCollapsed) ||
      main.querySelector("details[open], input:checked") !== null
    );
  };

  // Keeps the focus on its link or button when the content is replaced.
  const place = (main) => {
    const active = document.activeElement;
    if (!active || active === main || !main.contains(active)) return null;
    const alike = [...main.querySelectorAll(active.tagName)];
    return { tag: active.tagName, index: alike.indexOf(active), words: active.textContent };
  };

  const replace = (text) => {
    const next = new DOMParser().parseFromString(text, "text/html");
    const content = next.getElementById("main");
    const time = next.getElementById("as-of");
    if (!content || !time) return false;
    const main = document.getElementById("main");
    const stood = place(main);
    main.replaceChildren(...document.importNode(content, true).childNodes);
    showChooser();
    document.title = next.title;
    read = time.textContent;
    // The server marks a page that is too expensive to refresh: stop refreshing it.
    isLive = time.hasAttribute("data-live");
    hold.hidden = !isLive;
    loaded = Date.now();
    if (stood) {
      const again = main.querySelectorAll(stood.tag)[stood.index];
      if (again && again.textContent === stood.words) again.focus({ preventScroll: true });
    }
    return true;
  };

  const refresh = async () => {
    if (!isLive || isHeld || isReading || document.hidden || isInUse()) return;
    isReading = true;
    try {
      const answer = await fetch(location.href, {
        credentials: "same-origin",
        redirect: "manual",
        signal: AbortSignal.timeout(PATIENCE_MS),
      });
      if (answer.type === "opaqueredirect" || answer.status === 401) {
        say("– the session has ended: reload the page");
        return;
      }
      const text = await answer.text();
      if (isHeld || isInUse()) return;
      say(replace(text) ? "" : "– unexpected response from the server");
    } catch {
      say("– cannot reach the server");
    } finally {
      isReading = false;
    }
  };

  const tick = () => {
    const seconds = Math.round((Date.now() - loaded) / 1000);
    asOf.textContent = seconds < 2 ? read : `${read}, ${seconds} s ago`;
  };

  hold.hidden = false;
  hold.addEventListener("click", () => {
    isHeld = !isHeld;
    hold.setAttribute("aria-pressed", String(isHeld));
    hold.textContent = isHeld ? "Refreshing is paused" : "Pause refreshing";
    if (!isHeld) refresh();
  });
  document.addEventListener("visibilitychange", refresh);
  setInterval(tick, 1000);
  setInterval(refresh, PERIOD_MS);
})();

// Reads the page again every few seconds, while it is seen and nobody is at work in it. Nothing here is
// needed: without it, the page is as of its last loading.
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

  // A box that chooses all of the page: without script it would do nothing, and is not shown.
  const showChooser = () => {
    for (const chooser of document.querySelectorAll("[data-all]")) chooser.closest("label").hidden = false;
  };
  document.addEventListener("change", ({ target }) => {
    if (!target.matches("[data-all]")) return;
    for (const box of target.form.querySelectorAll('input[name="sequence"]')) box.checked = target.checked;
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
    // Only what is new is said aloud.
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

  // Whoever is at a link or a button stays there.
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
    // What costs too much to be read again is as of now.
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
        say("– the session is over: load the page again");
        return;
      }
      const text = await answer.text();
      if (isHeld || isInUse()) return;
      say(replace(text) ? "" : "– the server does not answer as it should");
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

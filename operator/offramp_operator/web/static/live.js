// Puts sections that changed in place. Without it the page says the same, as of its loading.
(() => {
  "use strict";
  const main = document.querySelector("main[data-live]");
  const state = document.getElementById("live-state");
  if (!main || !state || !window.EventSource) return;

  const RETRY_MS = 5000;
  const waiting = new Map();

  function busy(section) {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed && section.contains(selection.anchorNode);
  }

  // The first event brings every section. One that reads as before stays: replacing it would swallow a key that is down.
  function same(section, html) {
    const [shown, fresh] = [section.cloneNode(true), section.cloneNode(false)];
    for (const details of shown.querySelectorAll("details[open]")) details.removeAttribute("open");
    fresh.innerHTML = html;
    return shown.isEqualNode(fresh);
  }

  // What belongs to the reader stays: opened details, the focus, how far a wide table is scrolled.
  function replace(section, html) {
    const focused = section.contains(document.activeElement) ? document.activeElement : null;
    const focusables = (root) => [...root.querySelectorAll("a[href], summary, [tabindex], input, button")];
    const position = focused ? focusables(section).indexOf(focused) : -1;
    const key = focused && (focused.closest("details[id]")?.id ?? focused.getAttribute("href") ?? focused.getAttribute("aria-label"));
    const open = [...section.querySelectorAll("details[open][id]")].map((d) => d.id);
    const scrolled = new Map([...section.querySelectorAll(".scroll")].map((s) => [s.getAttribute("aria-label"), s.scrollLeft]));
    section.innerHTML = html;
    for (const id of open) section.querySelector(`details#${CSS.escape(id)}`)?.setAttribute("open", "");
    for (const s of section.querySelectorAll(".scroll")) s.scrollLeft = scrolled.get(s.getAttribute("aria-label")) ?? 0;
    if (focused) {
      const all = focusables(section);
      const same = all.find((e) => e.tagName === focused.tagName &&
        (e.closest("details[id]")?.id ?? e.getAttribute("href") ?? e.getAttribute("aria-label")) === key);
      (same ?? all[Math.min(position, all.length - 1)] ?? main).focus({ preventScroll: true });
    }
  }

  function put(id, html) {
    const section = document.getElementById(id);
    if (!section || (id !== "announce" && !section.hasAttribute("data-section"))) return;
    if (busy(section)) waiting.set(id, html);
    else if (!same(section, html)) replace(section, html);
  }

  document.addEventListener("selectionchange", () => {
    for (const [id, html] of waiting) {
      const section = document.getElementById(id);
      if (section && !busy(section)) { waiting.delete(id); replace(section, html); }
    }
  });

  function connect() {
    const source = new EventSource(main.dataset.live);
    source.addEventListener("sections", (event) => {
      for (const [id, html] of Object.entries(JSON.parse(event.data))) put(id, html);
    });
    source.addEventListener("open", () => { state.textContent = "live"; state.className = "on"; });
    source.addEventListener("error", () => {
      state.textContent = "not live, trying again"; state.className = "off";
      if (source.readyState === EventSource.CLOSED) setTimeout(connect, RETRY_MS);
    });
    addEventListener("pagehide", () => source.close(), { once: true });
  }
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
  connect();
})();

// Before the page is painted: the colours that were chosen the last time, on every page.
(() => {
  "use strict";
  const root = document.documentElement;
  try {
    const chosen = localStorage.getItem("erg-theme");
    if (chosen === "dark" || chosen === "light") root.dataset.theme = chosen;
    new MutationObserver(() => {
      if (root.dataset.theme) localStorage.setItem("erg-theme", root.dataset.theme);
    }).observe(root, { attributes: true, attributeFilter: ["data-theme"] });
  } catch { /* a browser that keeps nothing has the system's colours */ }
})();

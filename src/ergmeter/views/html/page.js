// Draws the charts of the page, keeps their time axes together, and turns the light on and off.
// Nothing here makes HTML of what a run says: Vega draws text as text, and so does this.
(() => {
  "use strict";
  const held = JSON.parse(document.getElementById("charts").textContent);
  const views = {};
  window.ergmeterViews = views; // by chart, for who wants to look into one
  const onTime = [];
  const whole = held.whole;
  let shared = whole;
  let busy = false;

  function show(domain) {
    const [low, high] = whole;
    const width = Math.min(domain[1] - domain[0], high - low);
    const start = Math.max(low, Math.min(domain[0], high - width));
    shared = [start, start + width];
    busy = true;
    const settled = onTime.map((view) => view.signal("zoom_t", shared).runAsync());
    return Promise.all(settled).finally(() => { busy = false; });
  }

  function follow(view) {
    onTime.push(view);
    view.addSignalListener("zoom_t", (_, domain) => {
      if (!busy) show(domain || whole);
    });
  }

  async function draw(chart) {
    const place = document.getElementById("chart-" + chart.id);
    const spec = overAxis(chart, chosenAxis());
    views[chart.id]?.finalize();
    const result = await vegaEmbed(place, spec, {
      mode: "vega-lite", renderer: "svg", actions: false, ast: true, defaultStyle: false,
      config: held.config, patch: silent, tooltip: { disableDefaultStyle: true },
    });
    // One picture with one description: thousands of readings are no list to be read aloud, and
    // the table below has them.
    const picture = place.querySelector("svg");
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", spec.description);
    views[chart.id] = result.view;
    if (chart.onTime) follow(result.view);
  }

  const moves = {
    all: () => whole,
    counted: () => held.counted,
    nearer: ([a, b]) => [a + (b - a) / 4, b - (b - a) / 4],
    farther: ([a, b]) => [a - (b - a) / 2, b + (b - a) / 2],
    earlier: ([a, b]) => [a - (b - a) / 3, b - (b - a) / 3],
    later: ([a, b]) => [a + (b - a) / 3, b + (b - a) / 3],
  };
  for (const button of document.querySelectorAll("button[data-zoom]")) {
    button.addEventListener("click", () => show(moves[button.dataset.zoom](shared)));
  }

  // Numbers with the highest first, texts by their letters; a second time the other way round.
  // What is not known stays last.
  function order(head) {
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    const rows = [...body.rows].map((row, place) => {
      const cell = row.cells[column], held = cell.dataset.value;
      return { row, place, value: held === undefined ? cell.textContent
        : held === "" ? null : Number(held) };
    });
    const isNumber = rows.some((one) => typeof one.value === "number");
    const before = head.getAttribute("aria-sort");
    const now = before ? (before === "ascending" ? "descending" : "ascending")
      : isNumber ? "descending" : "ascending";
    const sign = now === "ascending" ? 1 : -1;
    rows.sort((a, b) => a.value === null || b.value === null
      ? (a.value === null) - (b.value === null) || a.place - b.place
      : sign * (isNumber ? a.value - b.value : a.value.localeCompare(b.value)) || a.place - b.place);
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", now);
    body.append(...rows.map((one) => one.row));
  }
  for (const button of document.querySelectorAll("table.sortable th button")) {
    button.addEventListener("click", () => order(button.closest("th")));
  }

  const root = document.documentElement;
  const isDark = () => root.dataset.theme
    ? root.dataset.theme === "dark"
    : matchMedia("(prefers-color-scheme: dark)").matches;
  const toggle = document.getElementById("theme");
  const say = () => { toggle.textContent = isDark() ? "light colours" : "dark colours"; };
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    say();
  });
  say();

  addEventListener("beforeprint", () => {
    for (const part of document.querySelectorAll("details")) part.open = true;
  });

  const ready = Promise.all(held.charts.map((chart) => draw(chart).catch((error) => {
    document.getElementById("chart-" + chart.id).textContent = "not drawn: " + error.message;
    console.error(error);
  }))).then(() => { root.dataset.drawn = "true"; });
  followAxis(held.charts, draw, ready);
})();

// Fills the pages from the API. What comes from a run is set as text: nothing here makes HTML of it.
const RETRY_MS = 3000;
const self = document.querySelector("script[data-worker]");
const page = document.documentElement.dataset.page;
const METRICS = JSON.parse(self.dataset.metrics); // of each view, titles by key in their order
const byId = (id) => document.getElementById(id);
const pathId = () => location.pathname.split("/")[2];

function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((one) => one !== null && one !== undefined));
  return made;
}

async function ask(address, options = {}) {
  const answer = await fetch(address, options);
  if (answer.status === 304) return null;
  let body;
  try { body = await answer.json(); } catch { body = { error: "no answer that can be read" }; }
  if (!answer.ok) throw new Error(body.error || `error ${answer.status}`);
  return body;
}

const marked = (kind, found) => found.impossible ? `${kind} impossible` : kind;
const many = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

function sayState(words, kind = "") {
  const line = byId("state-line");
  line.textContent = words;
  line.dataset.kind = kind;
}

function table(heads, rows, label) {
  const head = el("tr", {}, ...heads.map((one) => el("th", { scope: "col" }, one)));
  const body = rows.map((row) => el("tr", {}, ...row.map((one) => el("td", {}, one))));
  return el("div", { class: "scroll", role: "region", "aria-label": label, tabindex: "0" },
    el("table", {}, el("thead", {}, head), el("tbody", {}, ...body)));
}

// Leaves in place what is where it belongs: an element that is taken out loses the focus.
function arrange(parent, wanted) {
  const kept = new Set(wanted);
  for (const child of [...parent.children]) if (!kept.has(child)) child.remove();
  let at = parent.firstElementChild;
  for (const one of wanted) if (one === at) at = at.nextElementSibling; else parent.insertBefore(one, at);
}

// What is not there, by its reason, so that each stands once.
function absentLines(pairs) {
  const titles = new Map();
  for (const [title, reason] of pairs) titles.set(reason, [...(titles.get(reason) || []), title]);
  return [...titles].map(([reason, all]) => el("p", { class: "absent" }, `No ${all.join(", ")}: ${reason}`));
}

// Readings of a view's metrics with their titles, and lines about those that are absent.
function titled(view, readings = {}) {
  const pairs = Object.entries(METRICS[view]).map(([key, title]) => [title, readings[key]]).filter(([, reading]) => reading);
  const there = pairs.filter(([, reading]) => reading.missing === undefined);
  const absent = absentLines(pairs.filter((pair) => !there.includes(pair)).map(([title, reading]) => [title, reading.missing]));
  return { there, absent };
}

// -- states: a sign and a word, never a colour alone ----------------------------------------------
const GOOD = ["finished", "imported", "exit code 0"];
function kindOf(status) {
  if (!status) return "pending";
  if (status === "running") return "running";
  if (GOOD.includes(status)) return "good";
  return status === "cut off" ? "cut" : "bad";
}
const SIGNS = { pending: "…", running: "▶", good: "✓", cut: "✂", bad: "✕" };
function stateOf(status) {
  const kind = kindOf(status);
  return el("span", { class: `status ${kind}` },
    el("span", { "aria-hidden": "true" }, `${SIGNS[kind]} `), status || "being read");
}

// -- the list -------------------------------------------------------------------------------------
const COLUMNS = [
  { key: "name", title: "run", value: (run) => run.name.toLowerCase() },
  { key: "status", title: "state", value: (run) => run.status || "" },
  { key: "created", title: "made", value: (run) => Date.parse(run.created) || 0 },
  { key: "model", title: "model", value: (run) => (run.model || "").toLowerCase(), side: true },
  { key: "devices", title: "devices", value: (run) => (run.devices || []).join(), side: true },
  ...Object.entries(METRICS.list).map(([key, title]) => ({ key, title, isFigure: true, value: (run) => figureOf(run, key).value ?? null })),
];
const figureOf = (run, key) => (run.readings || {})[key] || {};

function runsPage() {
  const wanted = new URLSearchParams(location.hash.slice(1));
  const view = {
    q: wanted.get("q") || "", state: wanted.get("state") || "", model: wanted.get("model") || "",
    device: wanted.get("device") || "", tag: wanted.get("tag") || "", cells: wanted.get("cells") || "",
    sort: wanted.get("sort") || "created", down: wanted.get("down") ?? "1",
  };
  let runs = [];
  const chosen = new Set();
  const rows = new Map(); // id: { element, said }

  function keep() {
    // An empty `down` is said too: without a word it is the other way.
    const said = new URLSearchParams(Object.entries(view).filter(([name, value]) => value !== "" || name === "down"));
    history.replaceState(null, "", "#" + said);
  }

  function isShown(run) {
    if (view.state && kindOf(run.status) !== view.state) return false;
    if (view.model && run.model !== view.model) return false;
    if (view.device && !(run.devices || []).includes(view.device)) return false;
    if (view.tag && !(run.tags || []).includes(view.tag)) return false;
    if (run.bench && !view.cells) return false;
    const text = [run.name, run.title, run.model, run.host, ...(run.tags || []), ...(run.notes_on_it || []), ...(run.command || []),
      ...(run.devices || [])].join(" ").toLowerCase();
    return view.q.toLowerCase().split(/\s+/).every((word) => text.includes(word));
  }

  function compareRuns(a, b) {
    const column = COLUMNS.find((one) => one.key === view.sort) || COLUMNS[0];
    const [x, y] = [column.value(a), column.value(b)];
    if (x === null || y === null) return (x === null) - (y === null); // what is absent stands last
    const order = x < y ? -1 : x > y ? 1 : a.name < b.name ? -1 : 1;
    return view.down ? -order : order;
  }

  function figure(found, title) {
    if (found.text === undefined) return el("td", { class: "number dim" }, "");
    const why = found.missing || [found.impossible, found.basis, found.note].filter(Boolean).join("; ");
    const basis = found.basis && found.basis !== "measured" ? ` ${found.basis}` : "";
    return el("td", { class: marked("number", found), title: why, "data-title": title }, found.bare ?? found.text,
      basis ? el("small", { class: "dim" }, basis) : null);
  }

  function rowOf(run) {
    const said = JSON.stringify(run);
    const known = rows.get(run.id);
    if (known && known.said === said) return known.element;
    const box = el("input", { type: "checkbox", "aria-label": `choose ${run.name}`, on: { change: () => {
      if (box.checked) chosen.add(run.id); else chosen.delete(run.id);
      showChoice();
    } } });
    box.checked = chosen.has(run.id);
    const name = el("td", { class: "name" }, el("a", { href: `/run/${run.id}` }, run.name));
    if (run.title && run.title !== run.name.split("/").pop()) name.append(" ", el("small", { class: "dim" }, run.title));
    for (const tag of run.tags || []) name.append(" ", el("span", { class: "tag" }, tag));
    for (const note of run.notes_on_it || []) name.append(el("div", { class: "dim why" }, note));
    const made = Date.parse(run.created) ? new Date(run.created) : null;
    const pad = (number) => String(number).padStart(2, "0");
    const when = made ? [`${made.getFullYear()}-${pad(made.getMonth() + 1)}-${pad(made.getDate())}`, `${pad(made.getHours())}:${pad(made.getMinutes())}`] : ["", ""];
    const state = el("td", { title: run.why || "" }, stateOf(run.status));
    if (run.why) state.append(el("div", { class: "dim why" }, run.why));
    const element = el("tr", { "data-id": run.id }, el("td", {}, box), name,
      state, el("td", { class: "when" }, el("span", {}, when[0]), " ", el("span", {}, when[1])),
      el("td", { class: "side" }, run.model || ""), el("td", { class: "side" }, (run.devices || []).join(", ")),
      ...COLUMNS.filter((one) => one.isFigure).map((one) => figure(figureOf(run, one.key), one.title)));
    rows.set(run.id, { element, said });
    return element;
  }

  function showChoice() {
    const link = byId("compare");
    const ids = [...chosen];
    const enough = ids.length >= 2;
    link.textContent = enough ? `compare ${ids.length} runs` : "compare: choose two runs";
    if (enough) { link.href = `/compare?ids=${ids.join(",")}`; link.removeAttribute("aria-disabled"); }
    else { link.removeAttribute("href"); link.setAttribute("aria-disabled", "true"); }
  }

  function showHead() {
    const head = byId("runs").tHead;
    const sorted = `${view.sort} ${view.down}`;
    if (head.dataset.sorted === sorted) return; // as it was: a button in it keeps the focus
    head.dataset.sorted = sorted;
    const cells = COLUMNS.map((one) => {
      const isSorted = view.sort === one.key;
      const sign = isSorted ? (view.down ? " ▼" : " ▲") : "";
      const button = el("button", { type: "button", "data-sort": one.key, on: { click: () => {
        if (view.sort === one.key) view.down = view.down ? "" : "1";
        else { view.sort = one.key; view.down = one.isFigure || one.key === "created" ? "1" : ""; }
        show();
        byId("runs").querySelector(`button[data-sort="${one.key}"]`).focus();
      } } }, one.title, el("span", { "aria-hidden": "true" }, sign));
      return el("th", { scope: "col", class: one.isFigure ? "number" : one.side ? "side" : null,
        "aria-sort": isSorted ? (view.down ? "descending" : "ascending") : null }, button);
    });
    head.replaceChildren(el("tr", {}, el("td", {}), ...cells));
  }

  // The rows in their order. Whoever is at one with the keyboard stays there, also where it was made anew or moved.
  function showRows(shown) {
    const held = document.activeElement;
    const id = held?.closest("#runs tbody tr")?.dataset.id;
    arrange(byId("runs").tBodies[0], shown.map(rowOf));
    if (id && document.activeElement !== held) rows.get(id)?.element.querySelector(held.localName)?.focus({ preventScroll: true });
  }

  // A run that is gone can't be compared, and has no box any more to be unticked.
  function forget() {
    const present = new Set(runs.map((run) => run.id));
    for (const id of rows.keys()) if (!present.has(id)) rows.delete(id);
    for (const id of chosen) if (!present.has(id)) chosen.delete(id);
    showChoice();
  }

  function fillChoice(id, values, words = (one) => one) {
    const select = byId(id);
    const known = [...select.options].map((one) => one.value).join("\n");
    if (view[id] && !values.includes(view[id])) values.push(view[id]);
    select.parentElement.hidden = values.length === 0;
    if (select.options.length && known === ["", ...values].join("\n")) return;
    select.replaceChildren(el("option", { value: "" }, "all"), ...values.map((one) => el("option", { value: one }, words(one))));
    select.value = view[id];
  }

  function show() {
    keep();
    showHead();
    const distinct = (pick) => [...new Set(runs.flatMap(pick))].filter(Boolean).sort();
    const names = { good: "finished", running: "running", cut: "cut off", bad: "failed", pending: "being read" };
    fillChoice("state", Object.keys(names).filter((kind) => runs.some((run) => kindOf(run.status) === kind)), (one) => names[one]);
    fillChoice("model", distinct((run) => [run.model]));
    fillChoice("device", distinct((run) => run.devices || []));
    fillChoice("tag", distinct((run) => run.tags || []));
    byId("cells-label").hidden = !runs.some((run) => run.bench);
    const shown = runs.filter(isShown).sort(compareRuns);
    showRows(shown);
    const pending = runs.filter((run) => run.is_pending).length;
    const hidden = runs.filter((run) => run.bench && !view.cells).length;
    const total = runs.length - hidden;
    byId("count").textContent = (shown.length === total ? many(total, "run") : `${shown.length} of ${many(total, "run")}`)
      + (pending ? `, ${pending} being read` : "") + (hidden ? `, ${many(hidden, "cell")} of benches not shown` : "");
    for (const one of [byId("filters"), byId("compare")]) one.hidden = runs.length === 0;
    byId("runs").parentElement.hidden = shown.length === 0;
    showNone(shown.length === 0, total, hidden);
    if (!pending) document.documentElement.dataset.drawn = "true";
  }

  // Of an empty list: how to make a run, or which of the filters hide them all and how to be rid of them.
  function showNone(isEmpty, total, hidden) {
    const place = byId("none");
    place.hidden = !isEmpty;
    const filters = ["q", "state", "model", "device", "tag"].filter((name) => view[name]);
    const words = filters.map((name) => name === "q" ? `\u201c${view.q}\u201d` : `${name} ${byId(name).selectedOptions[0].text}`);
    const said = JSON.stringify([total, hidden, words]);
    if (!isEmpty || place.dataset.said === said) return; // as it was: a button in it keeps the focus
    place.dataset.said = said;
    if (runs.length === 0) {
      place.replaceChildren("No run in this directory yet. ", el("code", {}, "erg record -- python train.py"),
        " makes one of any training, in runs/ unless --out says where; ", el("code", {}, "erg demo"), " makes a small one. It is listed here when it begins.");
      return;
    }
    const clear = el("button", { type: "button", id: "clear", on: { click: () => {
      for (const name of filters) { view[name] = ""; byId(name).value = ""; }
      if (total === 0) { view.cells = "1"; byId("cells").checked = true; }
      show();
      byId("q").focus();
    } } }, total === 0 ? "show them" : "show all runs");
    const why = total === 0 ? `All there is are ${many(hidden, "cell")} of benches, which are not shown. `
      : `No run matches ${words.join(" and ")}. `;
    place.replaceChildren(why, clear);
  }

  let tag = "";
  async function refresh() {
    let wait = 2000;
    try {
      const answer = await fetch("/api/runs", { headers: tag ? { "If-None-Match": tag } : {} });
      if (answer.status === 200) {
        tag = answer.headers.get("etag");
        const found = await answer.json();
        runs = found.runs;
        forget();
        byId("left-out").replaceChildren(...found.left_out.map((line) => el("li", {}, `left out: ${line}`)));
        show();
        if (found.pending) wait = 500;
      } else if (answer.status !== 304) byId("count").textContent = (await answer.json()).error;
    } catch { byId("count").textContent = "erg serve does not answer: has it been stopped?"; wait = 3000; }
    setTimeout(refresh, document.hidden ? 5000 : wait);
  }

  byId("q").value = view.q;
  byId("q").addEventListener("input", () => { view.q = byId("q").value; show(); });
  for (const id of ["state", "model", "device", "tag"]) byId(id).addEventListener("change", () => { view[id] = byId(id).value; show(); });
  byId("cells").checked = Boolean(view.cells);
  byId("cells").addEventListener("change", () => { view.cells = byId("cells").checked ? "1" : ""; show(); });
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
  refresh();
}

// -- a run while it is written --------------------------------------------------------------------
// Of what nothing can be seen now: what was seen before stays on the page.
const UNSEEN = { gone: "the run's directory is gone", unreadable: "the run can't be read" };

function loadCharts() {
  return new Promise((done, failed) => {
    const script = el("script", { src: self.dataset.charts });
    script.onload = done;
    script.onerror = () => failed(new Error("the charting library did not come"));
    document.head.append(script);
  });
}

const legendOf = (chart) => chart.legend.map(([label, colour]) => el("li", { class: colour }, label));

let library = null;
async function embed(spec, config, place) {
  library ??= loadCharts();
  await library;
  const result = await window.vegaEmbed(place, spec, { mode: "vega-lite", renderer: "svg",
    actions: false, ast: true, defaultStyle: false, config, patch: silent, tooltip: { disableDefaultStyle: true } });
  return result.view;
}

function watchRun(id, hear) {
  // Where a browser has no worker that tabs share, each has one of its own.
  const port = typeof SharedWorker === "undefined" ? new Worker(self.dataset.worker) : new SharedWorker(self.dataset.worker, "erg-serve").port;
  port.onmessage = ({ data }) => hear(data);
  const speak = () => port.postMessage({ id });
  const timer = setInterval(speak, 20_000);
  const leave = () => { clearInterval(timer); port.postMessage({ bye: true }); };
  addEventListener("pagehide", leave);
  addEventListener("pageshow", (event) => { if (event.persisted) location.reload(); });
  speak();
  return leave;
}

function runPage() {
  const id = pathId();
  const views = {};
  window.ergmeterViews = views;
  let state = null;
  let step = null;
  let isDone = false;

  const badge = (basis) => el("span", { class: `badge ${basis}` }, basis);

  const card = (title, one, ...more) => el("article", { class: marked("card", one) }, el("h3", {}, title), el("div", { class: "value" }, one.text),
    one.impossible ? el("div", { class: "why" }, one.impossible) : null, ...more);

  function tile(title, found) {
    return el("div", { class: marked("tile", found), title: [found.impossible, found.note].filter(Boolean).join("; ") }, el("dt", {}, title),
      el("dd", {}, title === found.unit ? found.bare : found.text), el("dd", { class: "basis" }, badge(found.basis)));
  }

  function showLive(seen) {
    byId("live").hidden = false;
    const { there, absent } = titled("live", seen.readings);
    const steps = el("dd", { id: "step" }, seen.step === null ? "none yet" : seen.step.toLocaleString("en"));
    byId("tiles").replaceChildren(el("div", { class: "tile" }, el("dt", {}, "steps"), steps),
      ...there.map(([title, found]) => tile(title, found)));
    byId("no-tiles").replaceChildren(...absent);
    byId("window").textContent = there.length + absent.length ? `Of the newest steps: a window of ${seen.window}.` : "";
    byId("marks").textContent = (seen.marks || []).map((one) => [one.name.replaceAll("_", " "), one.detail].filter(Boolean).join(": ")).join(" · ");
  }

  async function draw(chart, config, place) {
    const view = await embed(chart.spec, config, place);
    if (views[chart.id]) views[chart.id].finalize();
    views[chart.id] = view;
  }

  async function showCharts(only = "") {
    const found = await ask(`/api/run/${id}/charts${only && "?only=" + only}`);
    const section = byId("charts") || el("section", { id: "charts", "aria-label": "charts" }, el("h2", {}, "Over time"));
    if (!section.isConnected) byId("report").append(section);
    for (const chart of found.charts) {
      if (!chart.spec) continue;
      let figure = byId(`figure-${chart.id}`);
      if (!figure) {
        const unit = chart.unit && chart.unit !== "frac" ? ` (${chart.unit})` : "";
        figure = el("figure", { id: `figure-${chart.id}` }, el("h3", {}, chart.title + unit),
          el("ul", { class: "legend" }), el("div", { class: "chart" }));
        section.append(figure);
      }
      figure.querySelector(".legend").replaceChildren(...legendOf(chart));
      if (figure.matches(":hover, :focus-within") && views[chart.id]) continue; // somebody reads it
      await draw(chart, found.config, figure.querySelector(".chart"));
    }
    const lines = absentLines(found.charts.filter((chart) => !chart.spec).map((chart) => [chart.title, chart.reason]));
    const old = byId(`no-charts-${only}`);
    const made = el("div", { id: `no-charts-${only}` }, ...lines);
    if (old) old.replaceWith(made); else section.append(made);
  }

  function showFigures(found) {
    byId("title").textContent = found.title;
    document.title = `${found.title} · erg serve`;
    const { there, absent } = titled("run", found.shown);
    const cards = there.map(([title, one]) => card(title, one, one.interval ? el("div", { class: "dim" }, one.interval) : null, badge(one.basis),
      el("details", {}, el("summary", {}, "of this run"), el("p", {}, one.note))));
    const about = [found.devices.join(", "), found.host && `on ${found.host}`, found.model].filter(Boolean).join(" · ");
    const findings = found.check.findings.map((one) => el("li", {}, el("span", { class: one.weight }), one.seen, el("div", { class: "dim" }, one.effect)));
    const verdict = `${found.check.said[0].toUpperCase()}${found.check.said.slice(1)}.`;
    const ahead = found.ahead.missing === undefined ? found.ahead.text : `Progress unknown: ${found.ahead.missing}`;
    const made = el("section", { id: "figures", "aria-label": "figures" }, el("p", { class: "dim" }, about),
      el("h2", {}, state === "running" ? "So far" : "Figures"), state === "running" ? el("p", { id: "ahead" }, ahead) : null, el("div", { class: "cards" }, ...cards), ...absent,
      el("h2", {}, "Findings"), el("p", {}, el("strong", {}, verdict)),
      el("ul", { class: "findings" }, ...findings));
    const old = byId("figures");
    if (old && old.contains(document.activeElement)) return;
    if (old) old.replaceWith(made); else byId("report").prepend(made);
    byId("report-note").hidden = true;
  }

  // Of a long run that has ended: what is there soon, and then its report, which takes longer.
  async function showSoon() {
    const charts = showCharts("phases,steps,loss").then(() => showCharts("power"));
    const figures = ask(`/api/run/${id}/row`).then((row) => {
      if (byId("figures")) return;
      const { there, absent } = titled("list", row.readings);
      byId("report").prepend(el("section", { id: "figures", "aria-label": "figures" },
        el("div", { class: "cards" }, ...there.map(([title, one]) => card(title, one, badge(one.basis)))), ...absent));
    });
    await Promise.allSettled([charts, figures]); // what can't be had is told with the report
  }

  async function refresh() {
    try {
      await Promise.all([ask(`/api/run/${id}`).then(showFigures), showCharts()]);
    } catch (error) {
      if (!UNSEEN[state]) sayState(String(error.message), "bad");
    }
  }

  async function becomeReport() {
    if (isDone) return;
    isDone = true;
    let made;
    try { made = await fetch(`/run/${id}/report`, { method: "HEAD" }); }
    catch { // nobody answers: erg serve may be started again
      isDone = false;
      setTimeout(() => { if (kindOf(state) !== "running" && !UNSEEN[state]) becomeReport(); }, RETRY_MS);
      return;
    }
    if (!made.ok) { await refresh(); return; }
    // Once: a page that comes back the same must not turn for ever.
    const before = Number(sessionStorage.getItem(`erg-reload-${id}`));
    if (Date.now() - before < 10_000) return;
    sessionStorage.setItem(`erg-reload-${id}`, Date.now());
    location.reload();
  }

  let wanted = true;
  let isKeeping = false; // one that keeps up is enough, however often the run is taken up again
  async function keepUp() {
    isKeeping = true;
    let took = 0;
    if (wanted && !document.hidden && state === "running") {
      wanted = false;
      const began = performance.now();
      await refresh();
      took = performance.now() - began;
    }
    setTimeout(keepUp, Math.max(2000, 3 * took)); // a machine that is slow with it has other work
  }

  const stop = watchRun(id, (seen) => {
    if (seen.lost !== undefined) {
      if (seen.lost) sayState(`${seen.why || "erg serve does not answer: has it been stopped?"} What is shown is the last that was seen.`, "bad");
      else if (state) sayState(state === "running" ? "running" : state, kindOf(state));
      return;
    }
    const before = state;
    state = seen.state;
    if (UNSEEN[state]) {
      byId("report-note").hidden = true;
      const isShown = !byId("live").hidden || byId("figures");
      sayState(`${UNSEEN[state]}${isShown ? "; what is shown is the last that was seen of it" : ""} (${seen.why || "not found"})`, "bad");
      return;
    }
    sayState(state, kindOf(state));
    if (seen.title) { byId("title").textContent = seen.title; document.title = `${seen.title} · erg serve`; }
    if (state === "running" || before === "running") showLive(seen);
    if (state === "running") { isDone = false; wanted = wanted || seen.step !== step; step = seen.step; if (!isKeeping) keepUp(); }
    else {
      if (before === null) showSoon().then(becomeReport); else becomeReport();
      if (GOOD.includes(state)) stop();
    }
  });
}

// -- comparison -----------------------------------------------------------------------------------
// A chart with its legend, its note and its data table, as the pages in files have it.
function chartFigure(chart) {
  const figure = el("figure", { id: chart.id }, el("h3", {}, chart.title + (chart.unit ? ` (${chart.unit})` : "")));
  if (!chart.spec) {
    figure.append(el("p", { class: "absent" }, `- ${chart.reason}`));
    return figure;
  }
  figure.append(el("ul", { class: "legend" }, ...legendOf(chart)), el("div", { class: "chart", id: `chart-${chart.id}` }),
    el("figcaption", {}, chart.note),
    el("details", {}, el("summary", {}, "Data table"), table(chart.table.head, chart.table.rows, `${chart.title}, data table`)));
  return figure;
}

async function drawCompared(found) {
  const views = {};
  window.ergmeterViews = views;
  const config = { ...found.config, aria: false }; // each is one picture with one description
  const charts = [...found.charts, ...found.courses.charts].filter((one) => one.spec);
  async function draw(chart) {
    const place = byId(`chart-${chart.id}`);
    const spec = overAxis(chart, chosenAxis());
    views[chart.id]?.finalize();
    views[chart.id] = await embed(spec, config, place);
    const picture = place.querySelector("svg");
    picture.setAttribute("role", "img");
    picture.setAttribute("aria-label", spec.description);
  }
  const ready = (async () => { for (const chart of charts) await draw(chart); })();
  followAxis(charts, draw, ready);
  await ready;
  document.documentElement.dataset.drawn = "true";
}

// The curves of the runs, with the choice of what they are drawn over.
function coursesSection({ charts, axes, first, said, about }) {
  const boxes = axes.map(([name, words]) => el("label", {},
    el("input", { type: "radio", name: "x", value: name, autocomplete: "off", checked: name === first }), words));
  return el("section", { id: "courses", "aria-labelledby": "courses-title" }, el("h2", { id: "courses-title" }, "Over the course of the runs"),
    boxes.length ? el("fieldset", { id: "x-axis" }, el("legend", {}, "x axis"), ...boxes) : null,
    boxes.length ? el("p", { class: "dim" }, about) : null,
    ...charts.map(chartFigure), ...said.map((line) => el("p", { class: "absent" }, line)));
}

async function comparePage() {
  const place = byId("compared");
  const query = new URLSearchParams(location.search);
  if (!query.get("ids")) {
    sayState("No runs are named: choose two or more in the list of runs.", "bad");
    return;
  }
  try {
    const found = await ask(`/api/compare?${query}`);
    const { shown } = found;
    const keys = found.metrics.map((one) => one.key);
    const groups = found.groups.map((group, number) => [group.name, String(group.runs.length), ...keys.map((key) => shown.cells[number][key])]);
    for (const line of found.left_out) place.append(el("p", { class: "absent" }, `left out: ${line}`));
    place.append(table([found.group_by.join(", "), "runs", ...keys.map((key) => shown.heads[key])], groups, "Figures by group"));
    found.pairs.forEach((pair, number) => {
      const verdicts = pair.verdicts.map((one) => el("li", { class: `verdict ${one.state.replace(" ", "-")}` },
        el("span", { class: "badge" }, shown.signs[one.state]), " ", one.words));
      const around = shown.around[number].map((line) => el("li", { class: "dim" }, line));
      place.append(el("h2", {}, shown.titles[number]), el("ul", { class: "findings" }, ...verdicts, ...around));
    });
    if (shown.front) place.append(el("p", {}, shown.front));
    place.append(el("section", { id: "charts", "aria-label": "charts" }, el("h2", {}, "Intervals"), ...found.charts.map(chartFigure)),
      coursesSection(found.courses));
    for (const note of found.notes) place.append(el("p", { class: "dim" }, `note: ${note}`));
    const refused = found.pairs.length ? "not comparable as they are: the reasons stand below" : "one group: nothing to compare it with" + (found.left_out.length ? `; ${found.left_out.length} left out, with the reason below` : "");
    const isAnyway = found.is_comparable && found.pairs.some((pair) => pair.refusals.length);
    const comparable = isAnyway ? "compared anyway: what speaks against it stands below" : "comparable";
    sayState(found.is_comparable ? comparable : refused, found.is_comparable && !isAnyway ? "good" : "bad");
    if (found.pairs.length && !found.is_comparable && !query.get("anyway")) {
      query.set("anyway", "true");
      place.append(el("p", {}, el("a", { href: `/compare?${query}` }, "compare anyway; the reasons stay")));
    }
    await drawCompared(found);
  } catch (error) { sayState(String(error.message), "bad"); }
}

// -- benches and ledgers --------------------------------------------------------------------------
const LEVELS = 5;

async function benchPage() {
  let found, all;
  try {
    found = await ask(`/api/bench/${pathId()}`);
    all = await ask("/api/benches");
  } catch (error) { sayState(String(error.message), "bad"); return; }
  byId("title").textContent = (all.benches.find((one) => one.id === pathId()) || { name: "Bench" }).name;
  const figures = Object.entries(found.figures);
  const fill = (id, values, words, first) => {
    byId(id).replaceChildren(...values.map((one) => el("option", { value: one }, words(one))));
    byId(id).value = first;
    byId(id).addEventListener("change", show);
  };
  fill("down", found.axes, (one) => one.replaceAll("_", " "), found.axes[0]);
  fill("across", ["", ...found.axes], (one) => one ? one.replaceAll("_", " ") : "nothing", found.axes[1] || "");
  fill("figure", figures.map(([name]) => name), (one) => found.figures[one].title, (figures[0] || [""])[0]);

  // To the page of each cell's run, where there is one here; else just the name of its directory.
  function runsOf(group) {
    const links = group.paths.flatMap((path, number) => {
      const name = path.split("/").pop();
      const id = found.runs[path];
      return [number ? ", " : "", id ? el("a", { href: `/run/${id}` }, name) : name];
    });
    return links.length ? el("small", { class: "runs" }, ...links) : null;
  }

  function entry(group, name, scale, rest) {
    const said = rest.map((axis) => `${axis.replaceAll("_", " ")} ${group.axes[axis] ?? "-"}`).join(", ");
    const one = group.figures[name];
    const many = one && one.runs > 1 ? ` (${one.runs} runs)` : "";
    const runs = runsOf(group);
    if (group.is_ok && one) {
      const level = scale.most > scale.least ? Math.min(LEVELS - 1, Math.floor(LEVELS * (one.value - scale.least) / (scale.most - scale.least))) : 0;
      // nan, inf and impossible values have no place in the scale
      const shade = one.value === null ? "none" : one.impossible ? "none impossible" : `level${level}`;
      return el("div", { class: `cell ${shade}` }, el("span", {}, one.text + many), said ? el("small", {}, said) : null,
        group.status === "ok" ? null : el("small", { class: "part" }, `✕ ${group.status}`), runs);
    }
    const word = group.is_ok ? "- no figure" : `✕ ${group.status}`;
    const kind = ["pending", "running", "skipped"].includes(group.status) ? "waiting" : group.is_ok ? "none" : "failed";
    const sign = kind === "waiting" ? word.replace("✕", "…") : word;
    return el("div", { class: `cell ${kind}` }, el("span", {}, sign), said ? el("small", {}, said) : null,
      group.reason ? el("small", {}, group.reason.length > 160 ? `${group.reason.slice(0, 160).trimEnd()}...` : group.reason) : null, runs);
  }

  function show() {
    const [down, across, name] = [byId("down").value, byId("across").value, byId("figure").value];
    const values = found.groups.map((one) => one.is_ok && one.figures[name] && !one.figures[name].impossible ? one.figures[name].value : null).filter((one) => one !== null);
    const scale = { least: Math.min(...values), most: Math.max(...values) };
    const order = (axis) => [...new Set(found.groups.map((one) => one.axes[axis]))].sort((a, b) => {
      const [x, y] = [Number(a), Number(b)];
      return Number.isNaN(x) || Number.isNaN(y) ? String(a).localeCompare(String(b)) : x - y;
    });
    const columns = across && across !== down ? order(across) : [null];
    const rest = found.axes.filter((axis) => axis !== down && (columns[0] === null || axis !== across));
    const heads = columns.map((one) => one === null ? found.figures[name]?.title || "" : String(one ?? "-"));
    const body = order(down).map((value) => el("tr", {}, el("th", { scope: "row" }, String(value ?? "-")),
      ...columns.map((column) => el("td", {}, ...found.groups
        .filter((one) => one.axes[down] === value && (columns[0] === null || one.axes[across] === column))
        .map((one) => entry(one, name, scale, rest))))));
    const corner = columns[0] === null ? down.replaceAll("_", " ") : `${down.replaceAll("_", " ")} \\ ${across.replaceAll("_", " ")}`;
    const head = el("tr", {}, el("td", {}, corner), ...heads.map((one) => el("th", { scope: "col" }, one)));
    const failed = found.groups.filter((one) => !one.is_ok).length;
    const better = found.figures[name]?.is_lower_better ? "lower is better" : "higher is better";
    byId("matrix").replaceChildren(
      el("div", { class: "scroll", role: "region", "aria-label": "Matrix", tabindex: "0" },
        el("table", { class: "matrix" }, el("thead", {}, head), el("tbody", {}, ...body))),
      ...(found.figures[name] ? [el("p", { class: "dim" }, `${found.figures[name].title}: darker is more; ${better}. Hatched cells with ✕ have no figure.`)] : []),
      ...found.notes.map((note) => el("p", { class: "dim" }, note)));
    sayState(`${many(found.cells, "cell")} in ${many(found.groups.length, "configuration")}` + (failed ? `, ${failed} without a result` : ""));
  }
  show();
}

const MAKES = { benches: "`erg bench run` makes one", ledgers: "an energy_results.csv is one, as `erg train` writes it" };

async function namesPage(word, kind) {
  try {
    const found = (await ask(`/api/${word}`))[word];
    sayState(found.length ? `${found.length} in this directory` : `none in this directory: ${MAKES[word]}`);
    byId("table").append(el("ul", {}, ...found.map((one) => el("li", {}, el("a", { href: `/${kind}/${one.id}` }, one.name)))));
  } catch (error) { sayState(String(error.message), "bad"); }
}

const ALIKE = 12; // as many stand open

async function ledgerPage() {
  try {
    const found = await ask(`/api/ledger/${pathId()}`);
    const all = await ask("/api/ledgers");
    byId("title").textContent = (all.ledgers.find((one) => one.id === pathId()) || { name: "Ledger" }).name;
    const { heads, rows, alike } = found.table;
    const full = (one) => el("span", { title: one.title }, one.text);
    if (alike.length) {
      const said = alike.flatMap((one, number) => [number ? "; " : "", `${one.head} `, full(one)]);
      byId("table").append(el("details", { id: "alike", open: alike.length <= ALIKE },
        el("summary", {}, `The same in all rows: ${alike.length} columns`), el("p", {}, ...said)));
    }
    const whole = table(heads, rows.map((row) => row.map(full)), "Rows of the ledger");
    whole.classList.add("ledger");
    byId("table").append(whole);
    for (const remark of new Set(found.rows.flatMap((row) => row.remarks))) byId("table").append(el("p", { class: "dim" }, remark));
    for (const line of found.left_out) byId("table").append(el("p", { class: "absent" }, `left out: ${line}`));
    sayState(many(found.rows.length, "row") + (found.left_out.length ? `, ${found.left_out.length} left out` : ""));
  } catch (error) { sayState(String(error.message), "bad"); }
}

// -- all pages ------------------------------------------------------------------------------------
const root = document.documentElement;
byId("theme").addEventListener("click", () => {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
});
for (const link of document.querySelectorAll("header nav a")) {
  if (link.getAttribute("href") === location.pathname) link.setAttribute("aria-current", "page");
}
const PAGES = { runs: runsPage, run: runPage, compare: comparePage, bench: benchPage, ledger: ledgerPage,
  benches: () => namesPage("benches", "bench"), ledgers: () => namesPage("ledgers", "ledger") };
// What is drawn later says so itself.
const isFollowed = page === "runs" || page === "run" || page === "compare";
if (PAGES[page]) Promise.resolve(PAGES[page]()).then(() => { if (!isFollowed) root.dataset.drawn = "true"; });

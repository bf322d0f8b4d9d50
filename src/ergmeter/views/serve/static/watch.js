// One stream of events for all tabs. A browser opens six connections to a server and no more, so a
// stream for each tab would leave the seventh waiting for ever.
"use strict";
const QUIET_MS = 150_000; // a tab in the background speaks once a minute at the least
const AGAIN_MS = 5000;
const MOST = 200; // runs in one stream, as the server has it
const tabs = new Map(); // port: { id, heard }
const newest = new Map();
let source = null;
let watched = "";
let again = 0;

function follow() {
  const all = [...new Set([...tabs.values()].map((tab) => tab.id))]; // who came first is first
  const ids = all.slice(0, MOST);
  for (const id of all.slice(MOST)) tell([id], { lost: true, why: `${MOST} runs are followed at once, by all tabs together: close some.` });
  const wanted = [...ids].sort().join(",");
  if (wanted === watched && source && source.readyState !== EventSource.CLOSED) return;
  watched = wanted;
  if (source) source.close();
  source = null;
  for (const id of newest.keys()) if (!ids.includes(id)) newest.delete(id);
  if (ids.length) listen("/api/events?ids=" + wanted, ids);
}

function listen(address, ids) {
  const opened = new EventSource(address);
  source = opened;
  opened.onmessage = (event) => {
    const seen = JSON.parse(event.data);
    newest.set(seen.id, seen);
    tell([seen.id], seen);
  };
  opened.onopen = () => tell(ids, { lost: false });
  opened.onerror = () => {
    if (opened.readyState === EventSource.CLOSED) askWhy(address, ids);
    else tell(ids, { lost: true });
  };
}

// A stream that is refused is not told the reason and does not try again by itself.
async function askWhy(address, ids) {
  const leaving = new AbortController();
  let why;
  try {
    const answer = await fetch(address, { signal: leaving.signal });
    if (!answer.ok) why = `${(await answer.json()).error}.`;
  } catch { /* nobody answers, which is said without a reason */ }
  leaving.abort();
  tell(ids, { lost: true, why });
  clearTimeout(again);
  again = setTimeout(follow, AGAIN_MS);
}

function tell(ids, message) {
  for (const [port, tab] of tabs) if (ids.includes(tab.id)) port.postMessage(message);
}

function join(port) {
  port.onmessage = ({ data }) => {
    if (data.bye) tabs.delete(port);
    else {
      const isNew = !tabs.has(port);
      tabs.set(port, { id: data.id, heard: Date.now() });
      if (isNew && newest.has(data.id)) port.postMessage(newest.get(data.id));
    }
    for (const [other, tab] of tabs) if (Date.now() - tab.heard > QUIET_MS) tabs.delete(other);
    follow();
  };
}

globalThis.onconnect = (event) => join(event.ports[0]);
if (typeof SharedWorkerGlobalScope === "undefined") join(globalThis); // the worker of one tab

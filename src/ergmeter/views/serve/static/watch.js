// One stream of events for all tabs. A browser opens six connections to a server and no more, so a
// stream for each tab would leave the seventh waiting for ever.
"use strict";
const QUIET_MS = 150_000; // a tab in the background speaks once a minute at the least
const tabs = new Map(); // port: { id, heard }
const newest = new Map();
let source = null;
let watched = "";

function follow() {
  const ids = [...new Set([...tabs.values()].map((tab) => tab.id))].sort().join(",");
  if (ids === watched && source && source.readyState !== EventSource.CLOSED) return;
  watched = ids;
  if (source) source.close();
  source = null;
  for (const id of newest.keys()) if (!ids.includes(id)) newest.delete(id);
  if (!ids) return;
  source = new EventSource("/api/events?ids=" + ids);
  source.onmessage = (event) => {
    const seen = JSON.parse(event.data);
    newest.set(seen.id, seen);
    tell(seen.id, seen);
  };
  source.onerror = () => tell(null, { lost: true });
  source.onopen = () => tell(null, { lost: false });
}

function tell(id, message) {
  for (const [port, tab] of tabs) if (id === null || tab.id === id) port.postMessage(message);
}

onconnect = (event) => {
  const port = event.ports[0];
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
};

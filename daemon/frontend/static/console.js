// The console: asks for a key where one is needed, follows console/events, and draws what it says. When the stream ends
// it begins again by itself; what is shown meanwhile is marked as old.
"use strict";

const { element, drawn, spark, bar } = charts;
const SECONDS = 300;       // the most that lines show
const LEAST_SECONDS = 60;  // and the least
const STALE_SECONDS = 3.5; // older data is called old
const SILENT_SECONDS = 12; // then the connection is given up
const HIDDEN_SECONDS = 60; // a page that nobody sees for so long costs the server nothing
const KEY = "syshax-key";
const $ = (id) => document.getElementById(id);

let points = [], sample = null, offset = 0, heardAt = 0, connection = null, retry = 0, trouble = "", hiddenAt = 0, refusal = 0;

// ------------------------------------------------------------------ words for numbers

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const number = (value) => (value >= 100 || value === 0 || Number.isInteger(value) ? plain.format(value) : value.toFixed(1));
function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 ms";
  if (seconds < .001) return `${Math.round(1e6 * seconds)} µs`;
  if (seconds < .01) return `${(1000 * seconds).toFixed(1)} ms`;
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  return seconds < 10 ? `${seconds.toFixed(2)} s` : `${seconds.toFixed(0)} s`;
}
function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at += 1; }
  return `${count >= 100 || at === 0 ? count.toFixed(0) : count.toFixed(1)} ${units[at]}`;
}
const perSecond = (count) => (count >= 1e8 ? `${(count / 1e9).toFixed(count >= 1e10 ? 1 : 2)} GB/s` : `${(count / 1e6).toFixed(1)} MB/s`);
const percent = (part) => `${(100 * part).toFixed(part && part < .1 ? 1 : 0)} %`;
function since(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`;
}

// ------------------------------------------------------------------ small parts

function say(node, text) { if (node.textContent !== text) node.textContent = text; }

const MARKS = { good: "✓", warn: "!", bad: "✕", "": "–" };
function state(node, kind, text) {
  node.className = `state ${kind}`;
  if (!node.firstElementChild) node.append(element("span", { class: "mark", "aria-hidden": "true" }), element("span"));
  say(node.firstElementChild, MARKS[kind]);
  say(node.lastElementChild, text);
}

// A table whose rows stay the same elements as long as their keys do.
class Table {
  constructor(place, empty, columns) {
    this.columns = columns; this.rows = new Map();
    const head = element("tr", {}, ...columns.map((column) => element("th", { scope: "col", class: column.kind || "" }, column.title)));
    this.body = element("tbody");
    this.table = element("table", {}, element("thead", {}, head), this.body);
    this.empty = element("p", { class: "empty" }, empty);
    place.replaceChildren(element("div", { class: "panel" }, this.table, this.empty));
  }

  show(items, key) {
    const keys = new Set(items.map(key));
    for (const [name, row] of this.rows) if (!keys.has(name)) { row.remove(); this.rows.delete(name); }
    items.forEach((item, place) => {
      let row = this.rows.get(key(item));
      if (!row) {
        row = element("tr", {}, ...this.columns.map((column) => {
          const cell = element("td", { class: column.kind || "" });
          if (column.kind !== "name") cell.setAttribute("data-label", column.title);
          return cell;
        }));
        this.rows.set(key(item), row);
      }
      if (this.body.children[place] !== row) this.body.insertBefore(row, this.body.children[place] || null);
      this.columns.forEach((column, at) => {
        const drawnText = column.show(item, row.children[at]);
        if (typeof drawnText === "string") say(row.children[at], drawnText);
      });
    });
    this.table.hidden = !items.length;
    this.empty.hidden = items.length > 0;
  }
}

function within(cell, make) { // a cell's own element, made once
  if (!cell.firstElementChild) cell.append(make());
  return cell.firstElementChild;
}
const stateIn = (cell, kind, text) => { state(within(cell, () => element("span")), kind, text); };
function twoLines(cell, first, second) {
  if (!cell.firstElementChild) cell.append(element("span", {}, element("span"), element("span", { class: "why" })));
  say(cell.firstElementChild.children[0], first);
  say(cell.firstElementChild.children[1], second);
}
const span = () => Math.min(SECONDS, Math.max(LEAST_SECONDS, points.at(-1).at - points[0].at));
const both = (pair, word = time) => `${word(pair[0])} / ${word(pair[1])}`;

// ------------------------------------------------------------------ the tiles

const NOW = [
  { title: "Tokens per second", lines: [0], figure: (t) => [number(t.generated), "tok/s"],
    beside: (t) => `prompts ${number(t.prompt)} tok/s` },
  { title: "Time to first token", lines: [1, 2], figure: (t) => [time(t.first[0]), "p50"], beside: (t) => `┄ p99 ${time(t.first[1])}` },
  { title: "Gap between tokens", lines: [3, 4], figure: (t) => [time(t.gap[0]), "p50"], beside: (t) => `┄ p99 ${time(t.gap[1])}` },
  { title: "Requests running", lines: [5, 6], figure: (t) => [number(t.running), ""],
    beside: (t) => `┄ waiting ${number(t.waiting)} · ${number(t.requests)}/s · ${t.failed ? `✕ ${number(t.failed)} failed in a minute` : "none failed"}` },
];
function makeTile(title) {
  const parts = { figure: element("span"), span: element("span"), unit: element("small"), beside: element("div", { class: "beside" }), line: drawn("svg", { class: "spark" }) };
  parts.tile = element("div", { class: "tile" }, element("h3", {}, element("span", {}, title), parts.span), element("div", { class: "figure" }, parts.figure, parts.unit), parts.beside, parts.line);
  return parts;
}
const tiles = NOW.map((row) => { const parts = makeTile(row.title); $("tiles").append(parts.tile); return parts; });

function showTiles() {
  const times = points.map((point) => point.at), now = times.at(-1);
  NOW.forEach((row, place) => {
    const [figure, unit] = row.figure(sample.total), parts = tiles[place];
    say(parts.figure, figure); say(parts.unit, unit); say(parts.beside, row.beside(sample.total));
    say(parts.span, `last ${since(span())}`);
    spark(parts.line, times, row.lines.map((at) => points.map((point) => point.total[at])), now, span(), `${row.title}, last ${since(span())}; now ${figure} ${unit}`);
  });
}

// ------------------------------------------------------------------ the tables

const held = (name) => (sample.daemon.models || []).find((model) => model.name === name);
const models = new Table($("models"), "No model is known yet.", [
  { title: "Model", kind: "name", show: (m, cell) => twoLines(cell, m.name, held(m.name) ? `experts in syshaxd: ${held(m.name).format}, ${held(m.name).state}` : "") },
  { title: "Workers", show: (m, cell) => stateIn(cell, m.workers[0] === m.workers[1] && m.workers[1] ? "good" : m.workers[0] ? "warn" : "bad", `${m.workers[0]} of ${m.workers[1]} ready`) },
  { title: "Tokens/s", kind: "number", show: (m) => number(m.generated) },
  { title: "Last minutes", show: (m, cell) => {
    const times = points.map((point) => point.at);
    spark(within(cell, () => drawn("svg", { class: "spark" })), times, [points.map((point) => (point.models[m.name] || [null])[0])], times.at(-1), span(), `${m.name}: tokens per second, last ${since(span())}`);
  } },
  { title: "TTFT p50 / p99", kind: "number", show: (m) => both(m.first) },
  { title: "Gap p50 / p99", kind: "number", show: (m) => both(m.gap) },
  { title: "Running", kind: "number", show: (m) => number(m.running) },
  { title: "Waiting", kind: "number", show: (m) => number(m.waiting) },
]);

const EXPERTS = { attached: "good", missing: "bad", "not known": "" };
const workers = new Table($("workers"), "No worker is configured.", [
  { title: "Worker", kind: "name", show: (w, cell) => twoLines(cell, w.url, `${w.group} · ${w.models.join(", ") || "no model known"}`) },
  { title: "State", show: (w, cell) => stateIn(cell, w.ready ? (w.draining ? "warn" : "good") : "bad", w.ready ? (w.draining ? "draining" : "ready") : `not ready: ${w.reason}`) },
  { title: "Experts", show: (w, cell) => stateIn(cell, EXPERTS[w.experts] ?? "", w.experts) },
  { title: "Running", kind: "number", show: (w) => number(w.running) },
  { title: "Tokens/s", kind: "number", show: (w) => number(w.generated) },
]);

const sessions = new Table($("sessions"), "No worker is attached.", [
  { title: "Session", kind: "name", show: (s, cell) => twoLines(cell, `${s.id} · ${s.model}`, s.address) },
  { title: "State", show: (s, cell) => stateIn(cell, s.stale ? "bad" : "good", s.stale ? "its process is stopped" : s.in_flight ? "computing" : "attached") },
  { title: "Class", show: (s) => s.priority },
  { title: "Wait p50 / p99", kind: "number", show: (s) => both(s.wait, (ms) => time(ms / 1000)) },
  { title: "Service p50 / p99", kind: "number", show: (s) => both(s.service, (ms) => time(ms / 1000)) },
  { title: "Use", kind: "number", show: (s) => percent(s.use) },
]);

// ------------------------------------------------------------------ the daemon

const daemonState = element("span"), daemonText = element("span");
$("daemon").append(daemonState, daemonText);
const STATES = { ready: "good", degraded: "warn", draining: "warn", starting: "warn", "not seen": "bad", "not asked": "" };
function showDaemon(daemon) {
  const seen = daemon.nodes !== undefined;
  state(daemonState, STATES[daemon.state] ?? "", `syshaxd ${daemon.state}${daemon.reason ? `: ${daemon.reason}` : ""}`);
  say(daemonText, seen ? [
    `version ${daemon.version}`, daemon.cpu, daemon.isa, `up ${since(daemon.uptime)}`,
    `experts ${bytes(daemon.pool)}${daemon.limit ? ` of ${bytes(daemon.limit)}` : ""}`, `reads ${perSecond(daemon.read)}`,
    ...(daemon.warnings ? [`${daemon.warnings} warnings: syshaxctl status`] : []),
  ].join(" · ") : "");
  $("nodes").replaceChildren(...(daemon.nodes || []).map((node) => element("div", { class: "tile" },
    element("h3", {}, element("span", {}, `Node ${node.node}`), element("span", {}, `${node.threads} threads`)),
    element("div", { class: "figure" }, perSecond(node.read).split(" ")[0], element("small", {}, `${perSecond(node.read).split(" ")[1]} of weights read`)),
    element("div", { class: "row" }, element("span", {}, "Threads busy"), element("b", {}, percent(node.busy))), bar(node.busy),
    element("div", { class: "row" }, element("span", {}, "Experts in memory"), element("b", {}, `${bytes(node.pool)} of ${bytes(node.memory)}`)), bar(node.pool / (node.memory || 1)),
    element("div", { class: "row" }, element("span", {}, "Free memory"), element("b", {}, bytes(node.free))))));
  $("sessions").hidden = !seen;
  $("plane").classList.toggle("few", seen && daemon.nodes.length <= 2);
  if (seen) sessions.show(daemon.sessions, (row) => row.id);
}

// ------------------------------------------------------------------ the heat maps

const maps = new Map();
const times100 = (value) => `${(value / 100).toFixed(value < 1000 ? 1 : 0)} ×`;
function makeMap() {
  const parts = {
    title: element("h3"), text: element("p", { class: "line" }), canvas: element("canvas", { tabindex: "0", role: "img" }),
    scale: element("canvas", { "aria-hidden": "true" }), output: element("output"), at: 0,
  };
  parts.box = element("div", { class: "panel heat" }, parts.title, parts.text, parts.canvas,
    element("div", { class: "scale" }, element("span", {}, "never"), parts.scale, element("span", {}, `${charts.TOP / 100} × its even share and more`), parts.output));
  const point = (at) => {
    parts.at = Math.max(0, Math.min(parts.map.percent.length - 1, at));
    const layer = Math.floor(parts.at / parts.map.experts);
    say(parts.output, `layer ${parts.map.layer_ids[layer] ?? layer}, expert ${parts.at % parts.map.experts}: ${times100(parts.map.percent[parts.at])} its even share`);
  };
  parts.canvas.addEventListener("pointermove", (event) => {
    const area = parts.canvas.getBoundingClientRect(), { experts, layers } = parts.map;
    const column = Math.min(experts - 1, Math.floor(experts * (event.clientX - area.left) / area.width));
    const row = Math.min(layers - 1, Math.floor(layers * (event.clientY - area.top) / area.height));
    point(Math.max(0, row) * experts + Math.max(0, column));
  });
  parts.canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -parts.map.experts, ArrowDown: parts.map.experts }[event.key];
    if (step) { event.preventDefault(); point(parts.at + step); }
  });
  return parts;
}
function drawMap(parts) {
  const map = parts.map, most = map.percent.reduce((best, value, at) => (value > map.percent[best] ? at : best), 0);
  const layer = Math.floor(most / map.experts), never = map.percent.filter((value) => value === 0).length;
  say(parts.title, map.model);
  const when = map.seconds ? `in the last ${map.seconds} s` : "since it was loaded";
  say(parts.text, map.tokens
    ? `${map.layers} layers of ${map.experts} experts; ${when} most asked for: layer ${map.layer_ids[layer] ?? layer}, expert ${most % map.experts} (${times100(map.percent[most])} its even share); not asked for: ${plain.format(never)} of ${plain.format(map.percent.length)}.`
    : `${map.layers} layers of ${map.experts} experts; none has been asked for yet.`);
  parts.canvas.setAttribute("aria-label", `Heat map, a row for each layer, a column for each expert. ${parts.text.textContent}`);
  charts.heat(parts.canvas, map);
  charts.scale(parts.scale);
}
function showExperts(experts) {
  const shown = (experts && experts.models) || [];
  for (const [name, parts] of maps) if (!shown.some((map) => map.model === name)) { parts.box.remove(); maps.delete(name); }
  for (const map of shown) {
    if (!maps.has(map.model)) { maps.set(map.model, makeMap()); $("heat").append(maps.get(map.model).box); }
    maps.get(map.model).map = map;
    drawMap(maps.get(map.model));
  }
  document.querySelector("[aria-labelledby=heat-title]").hidden = !shown.length;
}
charts.dark.addEventListener("change", () => maps.forEach(drawMap));

// ------------------------------------------------------------------ the stream

function receive(kind, value) {
  heardAt = performance.now();
  if (kind === "hello") {
    offset = value.now - Date.now() / 1000;
    points = value.points;
    showExperts(value.experts);
  } else if (kind === "sample") {
    sample = value;
    points.push(value.point);
    while (points.length > SECONDS || points[0].at < value.point.at - SECONDS) points.shift();
    showTiles();
    models.show(value.models, (row) => row.name);
    workers.show(value.workers, (row) => `${row.group} ${row.url}`);
    showDaemon(value.daemon);
    state($("front"), value.ready ? "good" : "bad", value.ready ? "serving" : value.reason);
    document.title = `${number(value.total.generated)} tok/s · syshax`;
    $("board").hidden = false;
  } else if (kind === "experts") {
    showExperts(value);
  }
  tell();
}

async function follow(key) {
  const begun = new AbortController();
  connection = begun;
  heardAt = performance.now();
  try {
    const answer = await fetch("console/events", { headers: key ? { Authorization: `Bearer ${key}` } : {}, cache: "no-store", signal: begun.signal });
    if (answer.status === 401 || answer.status === 403) { refusal = answer.status; return "key"; }
    if (!answer.ok) return `the front-end answers ${answer.status}`;
    if (key) sessionStorage.setItem(KEY, key);
    $("ask").hidden = true;
    $("forget").hidden = !key;
    trouble = ""; retry = 0;
    let rest = "";
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return "the connection ended";
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const fields = Object.fromEntries(event.split("\n").map((line) => [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 2)]));
        receive(fields.event, JSON.parse(fields.data));
      }
    }
  } catch {
    return begun.signal.aborted ? "no data came" : "no connection";
  } finally {
    begun.abort();
    if (connection === begun) connection = null;
  }
}

async function run() {
  let key = sessionStorage.getItem(KEY);
  for (;;) {
    if (hiddenAt && performance.now() - hiddenAt > 1000 * HIDDEN_SECONDS) await shown();
    trouble = await follow(key);
    if (trouble === "key") {
      sessionStorage.removeItem(KEY);
      key = await asked(key !== null);
      continue;
    }
    tell();
    retry = Math.min(5, retry + .5);
    await new Promise((resolve) => setTimeout(resolve, 1000 * retry));
  }
}

function asked(wrong) {
  $("board").hidden = true; $("forget").hidden = true; $("ask").hidden = false; sample = null;
  state($("front"), "", "");
  $("front").replaceChildren();
  tell();
  if (wrong) {
    say($("asked"), refusal === 403 ? "That key is for some models only, and this page shows all of them."
      : "That key is not accepted. It must be one of this front-end's API keys.");
    $("asked").className = "wrong";
  }
  $("key").value = "";
  $("key").focus();
  return new Promise((resolve) => {
    $("ask").onsubmit = (event) => { event.preventDefault(); if ($("key").value.trim()) resolve($("key").value.trim()); };
  });
}
$("forget").addEventListener("click", () => { sessionStorage.removeItem(KEY); location.reload(); });

function shown() {
  return document.hidden ? new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true })) : Promise.resolve();
}
document.addEventListener("visibilitychange", () => { hiddenAt = document.hidden ? performance.now() : 0; });

function tell() {
  const age = sample ? Date.now() / 1000 + offset - sample.point.at : 0, old = sample !== null && age > STALE_SECONDS;
  document.body.classList.toggle("old", old);
  if (trouble === "key") { $("link").className = "state"; $("link").replaceChildren(); }
  else if (old) state($("link"), "bad", `data is ${since(age)} old${trouble ? `: ${trouble}, trying again` : ""}`);
  else if (trouble) state($("link"), "warn", `${trouble}, trying again`);
  else state($("link"), sample ? "good" : "", sample ? `live, ${new Date(1000 * (sample.point.at - offset)).toLocaleTimeString()}` : "connecting");
}
setInterval(() => {
  const silent = (performance.now() - heardAt) / 1000;
  if (connection && (silent > SILENT_SECONDS || (hiddenAt && performance.now() - hiddenAt > 1000 * HIDDEN_SECONDS))) connection.abort();
  tell();
}, 1000);

run();

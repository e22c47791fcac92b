// The start, the address, the keys that work everywhere, and what tests may touch.

// ---- which head is open; the address keeps it ----

function openHead(layer, head, { replace = false } = {}) {
  const wasOpen = state.open;
  set({ layer, head, open: true, ...pairIn(layer) });
  if (!wasOpen && !isWide()) $("#panel").scrollIntoView({ block: "start" });
  const hash = `#${layer}.${head}`;
  if (location.hash !== hash) {
    if (replace) history.replaceState(null, "", hash);
    else history.pushState(null, "", hash);
  }
  return settled();
}

// The pair, moved to tokens that a layer has as queries and keys.
function pairIn(layer) {
  if (!look.length) return {};
  const { queries, keys } = look.layers[layer];
  return {
    query: look.isQuery(layer, state.query) ? state.query : queries[1] - 1,
    key: look.isKey(layer, state.key) ? state.key : keys[0],
  };
}

function closeHead() {
  if (!look || !state.open) return;
  set({ open: false });
  history.pushState(null, "", location.pathname + location.search);
  const name = headName(Math.max(0, state.layer), Math.max(0, state.head));
  if (state.view === "maps") moveCursor(maps.cells.get(name));
  else $(`#heads-body a[data-head="${name}"]`)?.focus();
}

function headInAddress() {
  const found = /^#(\d+)\.(\d+)$/.exec(location.hash);
  if (!found) return null;
  const [layer, head] = [Number(found[1]), Number(found[2])];
  return look.has(layer, head) ? { layer, head } : null;
}

function followAddress() {
  if (!look) return;
  const found = headInAddress();
  if (found) set({ ...found, open: true, ...pairIn(found.layer) });
  else set({ open: false });
}

// The head before or after the open one, in the order that is shown.
function stepHead(by) {
  if (!look || !maps.cells.size) return;
  const inOrder = state.view === "maps" && state.order === "layer";
  const order = inOrder ? shownHeads() : ranked();
  if (!order.length) return;
  const here = order.findIndex(({ layer, head }) => layer === state.layer && head === state.head);
  const next = order[here < 0 ? 0 : (here + by + order.length) % order.length];
  openHead(next.layer, next.head);
  const cell = maps.cells.get(headName(next.layer, next.head));
  const wasInMaps = maps.box.contains(document.activeElement);
  moveCursor(cell, wasInMaps);
  cell.scrollIntoView({ block: "nearest" });
}

const isWide = () => matchMedia("(min-width: 900px)").matches;

function drawOpen() {
  const { open } = state;
  $("#panel").hidden = !open;
  document.body.classList.toggle("is-open", open);
  const name = open && look.has(state.layer, state.head) ? `${headName(state.layer, state.head)} · ` : "";
  sizeMaps();
  document.title = `${name}${look.model || "polyhead"}`;
}

// ---- view, theme ----

function drawView() {
  maps.box.hidden = state.view !== "maps";
  $("#ranking").hidden = state.view !== "table";
  $("#order").disabled = state.view !== "maps";
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("polyhead-theme", theme);
  } catch {
    // Storage may be forbidden; the choice then lasts as long as the page.
  }
  set({ dark: isDark() });
}

function bindRadios(name) {
  for (const input of elements(`input[name="${name}"]`)) {
    input.checked = input.value === state[name];
    input.addEventListener("change", () => input.checked && set({ [name]: input.value }));
  }
}

let panelWidth = 0; // without its padding; asked for once, because asking lays the page out

// Pictures are as wide as the panel.
const pictureWidth = (most) => Math.max(280, Math.min(most, panelWidth || most));

/** @type {ResizeObserverCallback} */
function fitPictures([{ contentRect }]) {
  const width = Math.floor(contentRect.width);
  if (width === panelWidth || !look || !state.open) return;
  panelWidth = width;
  drawPairView();
  drawLinks();
  drawWay();
}

function onKey(event) {
  if (event.defaultPrevented || event.altKey || event.metaKey || event.ctrlKey) return;
  if ($("#help").open || event.target.matches("select, textarea, input:not([type=radio], [type=checkbox], [type=range])")) return;
  const actions = {
    "[": () => stepHead(-1), "]": () => stepHead(1), Escape: closeHead,
    "?": () => $("#help").showModal(),
  };
  if (!(event.key in actions)) return;
  event.preventDefault();
  actions[event.key]();
}

// ---- the header ----

// The beginning and the end of a long text.
function middleCut(text, most) {
  const characters = [...text];
  if (characters.length <= most) return text;
  const begin = Math.ceil(most * 0.6);
  return `${characters.slice(0, begin).join("")} … ${characters.slice(begin - most).join("")}`;
}

function drawHeader() {
  $("#model").textContent = look.model;
  $("#prompt").textContent = middleCut(look.title, 150);
  $("#continuation").textContent = middleCut(look.continuation, 110);
  $(".title").title = look.title + look.continuation;
  const range = (values) => {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return least === most ? String(most) : t("fact_range", { least, most });
  };
  const shared = look.layers.some((_, layer) => look.sharesKeys(layer));
  /** @type {[string, string][]} */
  const facts = [
    [t("fact_tokens"), String(look.length)],
    [t("fact_shape"), `${look.layers.length} × ${range(look.layers.map(({ heads }) => heads))}`],
  ];
  if (shared) facts.push([t("fact_kv"), range(look.layers.map(({ kvHeads }) => kvHeads))]);
  for (const [name, value] of look.facts ?? []) facts.push([told(`fact_${name}`, name), value]);
  const fact = ([name, value]) => element("div", {}, [
    element("dt", { text: name }), element("dd", { text: value }),
  ]);
  $("#facts").replaceChildren(...facts.map(fact));
  if (look.rounded) {
    $("#facts").append(element("div", { classes: "warn", data: "rounded" }, [
      element("dt", { text: t("note") }), element("dd", { text: t("rounded") }),
    ]));
  }
}

// ---- looks ----

// Shows a look, and one beside it, in the place of those before.
function showLooks(first, second = null) {
  look?.leave();
  [look, beside] = [first, second];
  document.body.classList.toggle("is-empty", !look.length);
  if (!look.length) say(t("empty"));
  makeMeasures();
  const stays = look.has(state.layer, state.head);
  Object.assign(state, firstPair(), stays ? {} : { layer: -1, head: -1 }, { token: -1, cellQuery: -1, cellKey: -1, measured: 0 });
  if (state.measure >= measures.length) state.measure = 0;
  drawHeader();
  drawNotable();
  const found = headInAddress() ?? (stays && state.open ? { layer: state.layer, head: state.head } : null);
  if (found) Object.assign(state, found, { open: true }, pairIn(found.layer));
  else Object.assign(state, { open: Boolean(look.length && isWide() && !page.served) });
  set({ look: state.look + 1 });
  drawView();
}

function firstPair() {
  if (!look.length) return { query: -1, key: -1 };
  if (!look.focus) return { query: look.length - 1, key: look.layers[0].keys[0] };
  return { query: look.focus[0], key: look.focus[1] };
}

// Without a head in the address a wide window opens the best one for the pair.
function firstHead() {
  if (headInAddress() || !state.open || state.layer >= 0) return;
  const pair = look.notable?.pairs?.[0];
  if (pair && pair.query === state.query && pair.key === state.key) return openHead(pair.head[0], pair.head[1], { replace: true });
  const known = look.notable?.alignment?.[0] ?? [0, 0];
  const best = look.focus ? sorted(look.heads.map((head) => ({ ...head, value: measures[0].at(head) })), true)[0] : null;
  const { layer, head } = best ?? { layer: known[0], head: known[1] };
  openHead(layer, head, { replace: true });
}

function arrivedLayer(of, layer) {
  if (of !== look) return;
  drawRowsSeen();
}

// Reads the looks that stand in this file.
async function readFile() {
  const progress = $("#progress");
  progress.max = look.layers.length;
  try {
    for (const each of beside ? [look, beside] : [look]) {
      await each.source.read((layer) => {
        progress.value = layer + 1;
        each.statistics[layer] = /** @type {Numbers} */ (each.source.statistics(layer));
        arrivedLayer(each, layer);
      });
    }
  } catch (error) {
    progress.hidden = true;
    say(/** @type {Error} */ (error).message);
    throw error;
  }
  progress.hidden = true;
  if (!look.length) return;
  state.measured = look.layers.length;
  redraw();
  firstHead();
  const cell = maps.cells.get(headName(Math.max(0, state.layer), Math.max(0, state.head)));
  moveCursor(cell, false);
  if (isWide()) cell.scrollIntoView({ block: "center" });
}

// ---- start ----

function sayAgain() {
  if (!look) return;
  drawHeader();
  drawNotable();
  redraw();
  drawNext();
  if (page.served) drawAsked();
}

function start() {
  state.dark = isDark();
  startLanguage(sayAgain);
  startMaps();
  startText();
  startLarge();
  startTables();
  startRow();
  startNext();
  startSave();
  startAsking();
  ["view", "order", "scale", "lanes", "zoom"].forEach(bindRadios);
  $("#hide-first").addEventListener("change", (event) => set({ hideFirst: event.target.checked }));
  $("#theme").addEventListener("click", switchTheme);
  $("#help-open").addEventListener("click", () => $("#help").showModal());
  $("#previous").addEventListener("click", () => stepHead(-1));
  $("#next-head").addEventListener("click", () => stepHead(1));
  $("#close").addEventListener("click", closeHead);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set({ dark: isDark() }));
  addEventListener("popstate", followAddress);
  addEventListener("hashchange", followAddress);
  document.addEventListener("keydown", onKey);
  new ResizeObserver(fitPictures).observe($("#panel"));
}

on(["open", "layer", "head", "look"], drawOpen, { first: true }); // what is drawn in the panel asks how wide it is
on(["view"], () => {
  drawView();
  $("#overview").scrollTop = 0;
});

// What tests may wait for and look at.
const polyhead = {
  /** @type {Promise<unknown>} */
  ready: Promise.resolve(), // what was asked for is shown
  /** @type {Promise<unknown>} */
  painted: Promise.resolve(), // all small maps of a served look are drawn
  settled,
  // Whether a small map stands on the screen as the look has it.
  isDrawn(layer, head) { return !maps.stale.has(maps.cells.get(headName(layer, head))); },
  get look() { return look; },
  get beside() { return beside; },
  get maps() { return bothMaps; },
  weight(layer, head, query, key) {
    const inside = Number.isInteger(query) && Number.isInteger(key) && Number.isInteger(layer) && Number.isInteger(head) &&
      query >= 0 && query < look.length && key >= 0 && key < look.length && look.has(layer, head);
    if (!inside) throw new RangeError(`no weight at layer ${layer}, head ${head}, query ${query}, key ${key}`);
    return look.weight(layer, head, query, key);
  },
  select(layer, head) {
    if (!look.has(layer, head)) throw new RangeError(`no head at layer ${layer}, head ${head}`);
    return openHead(layer, head);
  },
};
window.polyhead = polyhead;

start();
if (!page.served) showLooks(...page.looks.map((header) => new Look(header, new FileSource(header))));
polyhead.ready = new Promise((resolve) => {
  if (document.readyState !== "loading") resolve(null);
  else document.addEventListener("DOMContentLoaded", resolve, { once: true });
}).then(() => (page.served ? (page.text ? lookAtAll() : undefined) : readFile()));
polyhead.ready.catch(() => {}); // told on the page; whoever awaits `ready` still learns of it

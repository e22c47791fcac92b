// The start, the address, the keys that work everywhere, and what tests may touch.

// ---- which head is open; the address keeps it ----

function openHead(layer, head, { replace = false } = {}) {
  const wasOpen = state.open;
  set({ layer, head, open: true });
  if (!wasOpen && !isWide()) $("#panel").scrollIntoView({ block: "start" });
  const hash = `#${layer}.${head}`;
  if (location.hash === hash) return;
  if (replace) history.replaceState(null, "", hash);
  else history.pushState(null, "", hash);
}

function closeHead() {
  if (!state.open) return;
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
  return layer < LAYERS && head < HEADS ? { layer, head } : null;
}

function followAddress() {
  const found = headInAddress();
  if (found) set({ ...found, open: true });
  else set({ open: false });
}

// The head before or after the open one, in the order that is shown.
function stepHead(by) {
  if (!isRead()) return;
  const inOrder = state.view === "maps" && state.order === "layer";
  const order = inOrder ? allHeads : ranked();
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
  const name = open && state.layer >= 0 ? `${headName(state.layer, state.head)} · ` : "";
  sizeMaps();
  document.title = `${name}${page.model || "polyhead"}`;
}

// ---- view, theme, status ----

function drawView() {
  maps.box.hidden = state.view !== "maps";
  $("#ranking").hidden = state.view !== "table";
  $("#order").disabled = state.view !== "maps";
  $("#overview").scrollTop = 0;
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  const theme = state.dark ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("polyhead-theme", theme);
  } catch {
    // Storage may be forbidden; the choice then lasts as long as the page.
  }
  set({ dark: isDark() });
}

function say(message) {
  $("#status").textContent = message;
  $("#status").hidden = !message;
}

function bindRadios(name) {
  for (const input of document.querySelectorAll(`input[name="${name}"]`)) {
    input.checked = input.value === state[name];
    input.addEventListener("change", () => input.checked && set({ [name]: input.value }));
  }
}

function onKey(event) {
  if (event.defaultPrevented || event.altKey || event.metaKey || event.ctrlKey) return;
  if ($("#help").open || event.target.matches("select, textarea")) return;
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
  $("#model").textContent = page.model;
  $("#prompt").textContent = middleCut(page.title, 150);
  $("#continuation").textContent = middleCut(page.continuation, 110);
  $(".title").title = page.title + page.continuation;
  const kv = [...new Set(page.kvHeads)];
  const shape = `${LAYERS} × ${HEADS}`;
  const facts = [
    [t("fact_tokens"), String(TOKENS)],
    [t("fact_shape"), shape],
    ...(kv.some((count) => count < HEADS)
      ? [[t("fact_kv"), kv.length > 1 ? t("fact_range", { least: Math.min(...kv), most: Math.max(...kv) }) : String(kv[0])]]
      : []),
    ...page.facts.map(([name, value]) => [told(`fact_${name}`, name), value]),
  ];
  const fact = ([name, value]) => element("div", {}, [
    element("dt", { text: name }), element("dd", { text: value }),
  ]);
  $("#facts").replaceChildren(...facts.map(fact));
  if (page.rounded) {
    $("#facts").append(element("div", { classes: "warn", data: "rounded" }, [
      element("dt", { text: t("note") }), element("dd", { text: t("rounded") }),
    ]));
  }
}

// ---- what to look at ----

// A sentence on the heads that do something known on this text; each opens by a click.
function drawNotable() {
  const found = page.notable;
  $("#notable").hidden = !found;
  if (found) fillNotable($("#notable-text"), found, openHead);
}

// ---- start ----

function firstPair() {
  if (!TOKENS) return { query: -1, key: -1 };
  if (!page.focus) return { query: TOKENS - 1, key: 0 };
  return { query: page.focus[0], key: page.focus[1] };
}

// Without a head in the address a wide window opens the best one for the pair.
function firstHead() {
  if (headInAddress() || !state.open || state.layer >= 0) return;
  const known = page.notable?.induction[0] ?? page.notable?.previous_token[0] ?? [0, 0];
  const { layer, head } = page.focus ? ranked(0, true)[0] : { layer: known[0], head: known[1] };
  openHead(layer, head, { replace: true });
}

async function read() {
  const progress = $("#progress");
  progress.max = LAYERS;
  try {
    await readWeights((layer) => {
      progress.value = layer + 1;
      for (const cell of maps.seen) if (place(cell).layer === layer) drawThumb(cell);
    });
  } catch (error) {
    progress.hidden = true;
    say(error.message);
    throw error;
  }
  progress.hidden = true;
  set({ layersRead: LAYERS });
  firstHead();
  const cell = maps.cells.get(headName(state.layer, state.head));
  if (!cell) return;
  moveCursor(cell, false);
  if (isWide()) cell.scrollIntoView({ block: "center" });
}

function start() {
  startLanguage(() => {
    drawHeader();
    drawNotable();
    redraw();
  });
  drawHeader();
  drawNotable();
  Object.assign(state, firstPair(), { dark: isDark() });
  startMaps();
  startText();
  startLarge();
  startTables();
  drawLegend();
  drawView();
  ["view", "order", "scale", "lanes", "zoom"].forEach(bindRadios);
  $("#hide-first").addEventListener("change", (event) => set({ hideFirst: event.target.checked }));
  $("#theme").addEventListener("click", switchTheme);
  $("#help-open").addEventListener("click", () => $("#help").showModal());
  $("#previous").addEventListener("click", () => stepHead(-1));
  $("#next").addEventListener("click", () => stepHead(1));
  $("#close").addEventListener("click", closeHead);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => set({ dark: isDark() }));
  addEventListener("popstate", followAddress);
  addEventListener("hashchange", followAddress);
  document.addEventListener("keydown", onKey);
  document.body.classList.toggle("is-empty", !TOKENS);
  if (!TOKENS) say(t("empty"));
  drawPanelTop();
  const found = headInAddress();
  if (found) set({ ...found, open: true });
  else if (TOKENS && isWide()) set({ open: true });
}

on(["open", "layer", "head"], drawOpen);
on(["view"], drawView);

start();

const ready = new Promise((resolve) => {
  if (document.readyState !== "loading") resolve();
  else document.addEventListener("DOMContentLoaded", () => resolve(), { once: true });
}).then(read);
ready.catch(() => {}); // told on the page; whoever awaits `ready` still learns of it

window.polyhead = Object.freeze({
  ready,
  weight(layer, head, query, key) {
    const inside = (value, end) => Number.isInteger(value) && value >= 0 && value < end;
    if (!inside(layer, LAYERS) || !inside(head, HEADS) || !inside(query, TOKENS) ||
        !inside(key, TOKENS)) {
      throw new RangeError(`no weight at layer ${layer}, head ${head}, query ${query}, key ${key}`);
    }
    return weight(layer, head, query, key);
  },
  select(layer, head) {
    if (!maps.cells.has(headName(layer, head))) {
      throw new RangeError(`no head at layer ${layer}, head ${head}`);
    }
    openHead(layer, head);
  },
});

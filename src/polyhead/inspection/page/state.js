// What the page shows now, who redraws when it changes, and the numbers that heads are sorted by.

const state = {
  layer: -1, head: -1, // the enlarged head, -1 until one is chosen
  open: false, // is it enlarged, or are all heads shown
  query: -1, key: -1, // the pinned pair of tokens
  token: -1, // the token under the pointer or focus, in the running text
  cellQuery: -1, cellKey: -1, // the cell under the pointer or cursor, in the large map
  view: "maps", order: "layer", measure: 0, descending: true,
  scale: "sqrt", hideFirst: false, lanes: "both", zoom: "fit",
  dark: false,
  layersRead: 0,
};

const watchers = [];

// Calls `draw` whenever one of `names` changes.
function on(names, draw) {
  watchers.push({ names, draw });
}

function set(changes) {
  const changed = Object.keys(changes).filter((name) => !Object.is(state[name], changes[name]));
  if (!changed.length) return;
  Object.assign(state, changes);
  for (const { names, draw } of watchers) {
    if (names.some((name) => changed.includes(name))) draw();
  }
}

// Draws everything anew: the language has changed.
function redraw() {
  for (const { draw } of watchers) draw();
}

const isRead = () => state.layersRead === LAYERS;

// ---- measures: the pair's weight, then the statistics of the header ----

const allHeads = Array.from({ length: LAYERS * HEADS }, (_, i) => ({
  layer: Math.floor(i / HEADS), head: i % HEADS,
}));

const measures = [
  {
    get name() { return TOKENS ? `${apart(label(state.query))} → ${apart(label(state.key))}` : t("stat.pair"); },
    get help() { return t("stat.pair.help"); },
    at: ({ layer, head }) =>
      TOKENS && packed[layer] ? weight(layer, head, state.query, state.key) : null,
  },
  ...page.statistics.map(({ name, values }) => ({
    get name() { return told(`stat.${name}`, name); },
    get help() { return told(`stat.${name}.help`, name); },
    at: ({ layer, head }) => values[layer][head],
  })),
];

// Heads from best to worst; heads without a number come last, equals stay in layer order.
function ranked(measure = state.measure, descending = state.descending) {
  const sign = descending ? -1 : 1;
  return allHeads
    .map((head) => ({ ...head, value: measures[measure].at(head) }))
    .sort((a, b) => {
      if (a.value === null || b.value === null) return (a.value === null) - (b.value === null);
      return sign * (a.value - b.value);
    });
}

// Smallest and largest value, to draw bars; shares always run from 0 so that bars compare.
function extent(measure) {
  const values = allHeads.map(measures[measure].at).filter((value) => value !== null);
  return [Math.min(0, ...values), Math.max(1e-9, ...values)];
}

// ---- small DOM help ----

// Scrolls `box`, and nothing around it, until `child` is in view.
function reveal(box, child) {
  const outer = box.getBoundingClientRect();
  const inner = child.getBoundingClientRect();
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 4;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 4;
}

const tip = $("#tip");

function showTip(x, y, lines) {
  tip.replaceChildren(...lines.map((text) => element("div", { text })));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
  const top = y + 16 + height > innerHeight ? y - 12 - height : y + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  tip.hidden = true;
}

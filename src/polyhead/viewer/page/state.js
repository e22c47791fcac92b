// What the page shows now, and who redraws when it changes.

const page = JSON.parse($("#page-data").textContent);

/** @type {Look} */
let look = /** @type {any} */ (null); // the one that is shown; nothing is drawn before there is one
/** @type {Look | null} */
let beside = null; // the one beside it

const state = {
  layer: -1, head: -1, // the enlarged head, -1 until one is chosen
  open: false, // is it enlarged, or are all heads shown
  query: -1, key: -1, // the pinned pair of tokens
  token: -1, // the token under the pointer or focus, in the running text
  cellQuery: -1, cellKey: -1, // the cell under the pointer or cursor, in the large map
  view: "maps", order: "layer", measure: 0, descending: true,
  scale: "sqrt", hideFirst: false, lanes: "both", zoom: "fit",
  layers: "", least: "", // which heads are shown among all
  dark: false,
  look: 0, // how many looks were shown
  parts: 0, rows: 0, pairs: 0, products: 0, ways: 0, // how often such answers arrived
  measured: 0, // layers whose statistics are there
};

/** @typedef {keyof typeof state} StateName */

/** @type {{ names: StateName[], draw: () => void }[]} */
const watchers = [];

// Calls `draw` whenever one of `names` changes, once there is a look; some before all others.
/** @param {StateName[]} names @param {() => void} draw */
function on(names, draw, { first = false } = {}) {
  watchers[first ? "unshift" : "push"]({ names, draw });
}

/** @param {Partial<typeof state>} changes */
function set(changes) {
  const changed = /** @type {StateName[]} */ (Object.keys(changes)).filter((name) => !Object.is(state[name], changes[name]));
  if (!changed.length) return;
  Object.assign(state, changes);
  if (!look) return;
  for (const { names, draw } of watchers) {
    if (names.some((name) => changed.includes(name))) draw();
  }
}

// Draws everything anew: the language has changed, or there is another look.
function redraw() {
  if (look) for (const { draw } of watchers) draw();
}

/** @param {string} message */
function say(message) {
  $("#status").textContent = message;
  $("#status").hidden = !message;
}

// ---- what is on its way ----

let waiting = 0;
let frame = 0;
/** @type {Set<"parts" | "rows" | "pairs" | "products" | "ways">} */
const came = new Set(); // kinds of answers that are not drawn yet
/** @type {((done: unknown) => void)[]} */
const settling = [];

// Counts an answer of a kind that is asked for, and draws what shows such ones when it is there.
/** @param {Promise<any>} promise @param {"parts" | "rows" | "pairs" | "products" | "ways"} kind */
function awaited(promise, kind) {
  waiting++;
  return promise.finally(() => {
    waiting--;
    came.add(kind);
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const kinds = [...came];
      came.clear();
      set(Object.fromEntries(kinds.map((name) => [name, state[name] + 1])));
      if (!waiting) settling.splice(0).forEach((done) => done(null));
    });
  });
}

// Resolves when nothing is asked for any more, and all that came is drawn.
function settled() {
  return waiting || frame ? new Promise((done) => settling.push(done)) : Promise.resolve();
}

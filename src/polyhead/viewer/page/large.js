// The enlarged head: a heat map with the tokens on both axes, a cursor and exact weights. A long text
// is shown in parts: a cell is then several tokens, and the map zooms and moves. There are two such
// maps: of the look that is shown, and of the one beside it.

const EDGE = 3; // room around the cells for the ring on one at the edge, in CSS pixels
const MIN_LABELLED = 12; // smallest cell, in CSS pixels, beside which a label can be read
const MAP_CELLS = 256; // cells a side where a cell is several tokens
const LEAST_TOKENS = 8; // shown when zoomed in

/** @abstract */
class LargeMap {
  /** @param {HTMLElement} figure @param {boolean} second */
  constructor(figure, second) {
    /** @type {(name: string) => any} */
    const part = (name) => figure.querySelector(`.${name}`);
    this.second = second;
    this.box = part("large-box");
    this.room = part("large-room");
    this.canvas = part("heatmap");
    this.line = part("readout");
    this.cell = 0; // the side of one, in CSS pixels
    this.left = this.top = 0; // room for the axes
    this.picture = document.createElement("canvas");
    this.pictureOf = ""; // what it shows
    /** @type {Rectangle | null} */
    this.pictureMap = null;
    this.window = { q: 0, k: 0, size: 0 };
    this.of = ""; // the look and layer whose window it is
    this.sizedFor = "";
    this.cursor = { query: -1, key: -1 }; // of the second map; the first one's is the page's
    this.watch();
  }

  /** @returns {Look} */
  get look() {
    return this.second ? /** @type {Look} */ (beside) : look;
  }

  get isShown() {
    return state.open && this.look?.length && this.look.has(state.layer, state.head);
  }

  // The cell under the pointer or cursor, and the pinned pair.
  get at() {
    return this.second ? this.cursor : { query: state.cellQuery, key: state.cellKey };
  }

  get pinned() {
    if (!this.second) return { query: state.query, key: state.key };
    const { queries, keys } = this.look.layers[state.layer];
    return { query: queries[1] - 1, key: keys[0] };
  }

  pointTo(query, key) {
    if (!this.second) return set({ cellQuery: query, cellKey: key });
    this.cursor = { query, key };
    this.draw();
    this.tell();
  }

  // ---- the part of the text that is in view, in the layer's own queries and keys ----

  // Back to the whole text where another look or layer came.
  settle() {
    const { rows, columns } = this.look.sides(state.layer);
    const of = [state.look, this.second, rows, columns].join();
    if (of === this.of) return;
    this.of = of;
    this.window = { q: 0, k: 0, size: Math.max(rows, columns) };
  }

  get ends() {
    const { q, k, size } = this.window;
    const { rows, columns } = this.look.sides(state.layer);
    return { q0: Math.min(q, rows), q1: Math.min(rows, q + size), k0: Math.min(k, columns), k1: Math.min(columns, k + size) };
  }

  get isWhole() {
    const { rows, columns } = this.look.sides(state.layer);
    return this.window.size >= Math.max(rows, columns);
  }

  get map() {
    const { q0, q1, k0, k1 } = this.ends;
    const pixels = Math.max(q1 - q0, k1 - k0) <= WHOLE_TOKENS ? WHOLE_TOKENS : MAP_CELLS;
    return this.look.part(state.layer, state.head, this.ends, pixels);
  }

  zoom(factor, x = 0.5, y = 0.5) {
    const { rows, columns } = this.look.sides(state.layer);
    const most = Math.max(rows, columns);
    const size = Math.round(Math.max(Math.min(LEAST_TOKENS, most), Math.min(most, this.window.size * factor)));
    const change = this.window.size - size;
    this.move(this.window.q + y * change, this.window.k + x * change, size);
  }

  move(q, k, size = this.window.size) {
    const { rows, columns } = this.look.sides(state.layer);
    const inside = (start, length) => Math.round(Math.max(0, Math.min(length - size, start)));
    this.window = { q: inside(q, rows), k: inside(k, columns), size };
    this.size();
    this.tell();
  }

  // ---- size ----

  // Chooses the size of a cell: as large as fits, or large enough for every label.
  size() {
    if (!this.isShown || !this.box.clientWidth) return;
    this.settle();
    const { map } = this;
    if (!map) return this.wait();
    const room = [this.box.parentElement.clientWidth, $("#panel").clientHeight, devicePixelRatio, state.zoom, language];
    const sizedFor = [...room, this.of, Object.values(this.ends), map.cell].join();
    if (sizedFor === this.sizedFor && map.cell > 1) return this.draw(); // to measure again takes long
    this.sizedFor = sizedFor;
    const longest = Math.max(map.rows, map.columns);
    const context = this.canvas.getContext("2d");
    context.font = fontOf();
    const widest = longest > WHOLE_TOKENS / 2 || map.cell > 1 ? 76
      : Math.max(...this.names(map).map((text) => context.measureText(text).width));
    const width = this.box.parentElement.clientWidth;
    const margin = Math.ceil(Math.min(widest + 14, width < 480 ? 76 : 112));
    Object.assign(this, { left: margin + 22, top: margin + 22 });
    const height = this.heightFor(map, width);
    const dpr = devicePixelRatio || 1;
    const across = (width - this.left - EDGE) / map.columns;
    const fit = Math.min(across, (height - this.top - EDGE) / map.rows, 44);
    const wanted = state.zoom === "labels" ? Math.max(15, fit) : Math.max(1, fit);
    // Whole device pixels keep large cells equal; tiny cells would lose too much room to that.
    this.cell = wanted * dpr < 5 ? wanted : Math.floor(wanted * dpr) / dpr;
    const [wide, high] = [this.cell * map.columns, this.cell * map.rows];
    this.room.style.width = `${this.left + wide + EDGE}px`;
    this.room.style.height = `${this.top + high + EDGE}px`;
    this.box.style.height = `${Math.min(height, Math.ceil(this.top + high + EDGE))}px`;
    if (!this.second) $("#zoom").hidden = fit >= MIN_LABELLED || map.cell > 1;
    const [viewWidth, viewHeight] = [this.box.clientWidth, this.box.clientHeight];
    this.canvas.width = Math.round(viewWidth * dpr);
    this.canvas.height = Math.round(viewHeight * dpr);
    this.canvas.style.width = `${viewWidth}px`;
    this.canvas.style.height = `${viewHeight}px`;
    Object.assign(this.canvas.dataset, { cell: this.cell, left: this.left, top: this.top });
    this.draw();
  }

  // What is left of the panel, if that makes cells of a good size; else what a scrolled panel shows.
  heightFor(map, width) {
    const panel = $("#panel");
    const above = this.box.getBoundingClientRect().top - panel.getBoundingClientRect().top + panel.scrollTop;
    if (getComputedStyle(panel).overflowY !== "auto") return Math.max(width, 420);
    const left = panel.clientHeight - above - 20;
    return left - this.top >= 22 * map.rows ? left : Math.max(left, Math.min(width, panel.clientHeight - 56));
  }

  // The labels of the map's rows and columns.
  names({ rows, columns, cell }) {
    const { queries, keys } = this.look.layers[state.layer];
    const { q0, k0 } = this.ends;
    const label = (first, i) => this.look.labels[first + i * cell];
    return [
      ...Array.from({ length: rows }, (_, i) => label(queries[0] + q0, i)),
      ...Array.from({ length: columns }, (_, i) => label(keys[0] + k0, i)),
    ];
  }

  draw() {
    throw new Error("how it is drawn stands in large_draw.js");
  }

  wait() {
    this.canvas.getContext("2d").clearRect(0, 0, this.canvas.width, this.canvas.height);
    this.line.textContent = "…";
  }

  // ---- the readout: query, key and the exact weight ----

  tell() {
    if (!this.isShown) return this.line.replaceChildren();
    this.settle();
    const here = this.look;
    const isCell = this.at.query >= 0;
    const { query, key } = isCell ? this.at : this.pinned;
    const { map } = this;
    const several = isCell && map && map.cell > 1;
    const value = several ? this.cellValue(map, query, key) : here.weight(state.layer, state.head, query, key);
    const word = (token, side) => [
      element("b", { text: here.shown[token], data: `readout-${side}${this.mark}`, dir: "auto" }),
      element("span", { classes: "index", text: String(token), data: `readout-${side}-index${this.mark}` }),
    ];
    this.line.replaceChildren(
      element("span", { classes: "kind", text: t(isCell ? "cell" : "pair") }),
      ...word(query, "query"), element("span", { classes: "index", text: "→" }), ...word(key, "key"),
      element("output", { text: exact(value), data: `readout-weight${this.mark}` }),
      ...(this.isWhole && map?.cell === 1 ? [] : [element("span", { classes: "index part", text: this.said(map) })]),
    );
  }

  get mark() {
    return this.second ? "-b" : "";
  }

  // Which part of the text is in view.
  said(map) {
    const { queries, keys } = this.look.layers[state.layer];
    const { q0, q1, k0, k1 } = this.ends;
    const ends = { q0: queries[0] + q0, q1: queries[0] + q1 - 1, k0: keys[0] + k0, k1: keys[0] + k1 - 1 };
    if (!map) return "…";
    return map.cell > 1 ? t("part_cells", { ...ends, cell: map.cell }) : t("part", ends);
  }

  cellValue(map, query, key) {
    const { queries, keys } = this.look.layers[state.layer];
    const { q0, k0 } = this.ends;
    const row = Math.floor((query - queries[0] - q0) / map.cell);
    const column = Math.floor((key - keys[0] - k0) / map.cell);
    return map.values[row * map.columns + column] ?? null;
  }

  // ---- pointer and keys ----

  cellAt(event) {
    const { map } = this;
    if (!map) return null;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (x < this.left || y < this.top) return null;
    const column = Math.floor((x - this.left + this.box.scrollLeft) / this.cell);
    const row = Math.floor((y - this.top + this.box.scrollTop) / this.cell);
    if (column >= map.columns || row >= map.rows) return null;
    const { queries, keys } = this.look.layers[state.layer];
    const { q0, k0 } = this.ends;
    return { query: queries[0] + q0 + row * map.cell, key: keys[0] + k0 + column * map.cell };
  }

  leave() {
    hideTip();
    if (this.at.query >= 0) this.pointTo(-1, -1);
  }

  onKey(event) {
    if (!this.isShown || event.altKey || event.metaKey || event.ctrlKey) return;
    const by = this.map?.cell ?? 1;
    const { queries, keys } = this.look.layers[state.layer];
    const moves = {
      ArrowUp: [-by, 0], ArrowDown: [by, 0], ArrowLeft: [0, -by], ArrowRight: [0, by],
      Home: [0, -Infinity], End: [0, Infinity],
    };
    const zooms = { "+": 1 / 1.5, "=": 1 / 1.5, "-": 1.5, 0: Infinity };
    const here = this.at.query >= 0 ? this.at : this.pinned;
    if (event.key in moves) {
      event.preventDefault();
      const [down, right] = moves[event.key];
      const inside = (value, [first, stop]) => Math.min(stop - 1, Math.max(first, value));
      const to = { query: inside(here.query + down, queries), key: inside(here.key + right, keys) };
      this.show(to.query, to.key);
      this.pointTo(to.query, to.key);
    } else if (event.key in zooms) {
      event.preventDefault();
      const { q, k, size } = this.window;
      this.zoom(zooms[event.key], (here.key - keys[0] - k) / size, (here.query - queries[0] - q) / size);
    } else if (!this.second && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      set({ query: here.query, key: here.key });
    }
  }

  // Moves the window and scrolls the box until the cell is in view.
  show(query, key) {
    const { queries, keys } = this.look.layers[state.layer];
    const [row, column] = [query - queries[0], key - keys[0]];
    const { q, k, size } = this.window;
    const into = (at, first) => Math.max(Math.min(first, at), at + 1 - size);
    if (into(row, q) !== q || into(column, k) !== k) this.move(into(row, q), into(column, k));
    const { q0, k0 } = this.ends;
    const cells = this.map?.cell ?? 1;
    const scroll = (at, length, now) => Math.max(Math.min(now, at), at + this.cell - length);
    this.box.scrollLeft = scroll(((column - k0) / cells) * this.cell, this.box.clientWidth - this.left - EDGE, this.box.scrollLeft);
    this.box.scrollTop = scroll(((row - q0) / cells) * this.cell, this.box.clientHeight - this.top - EDGE, this.box.scrollTop);
  }

  watch() {
    const { canvas, box } = this;
    const size = () => this.size();
    new ResizeObserver(size).observe(box.parentElement);
    if (!this.second) new ResizeObserver(size).observe($("#panel"));
    box.addEventListener("scroll", () => this.draw(), { passive: true });
    let held = null;
    canvas.addEventListener("pointermove", (event) => {
      if (held && !this.isWhole) {
        const tokens = this.window.size / (this.cell * Math.max(this.map?.rows ?? 1, this.map?.columns ?? 1));
        this.move(held.q - (event.clientY - held.y) * tokens, held.k - (event.clientX - held.x) * tokens);
      }
      const at = this.cellAt(event);
      if (!at) return this.leave();
      this.pointTo(at.query, at.key);
      const value = this.map.cell > 1 ? this.cellValue(this.map, at.query, at.key)
        : this.look.weight(state.layer, state.head, at.query, at.key);
      showTip(event.clientX, event.clientY, [
        `${apart(this.look.shown[at.query])} → ${apart(this.look.shown[at.key])}`,
        `${exact(value)}   (${at.query}, ${at.key})`,
      ]);
    });
    canvas.addEventListener("pointerdown", (event) => { held = { x: event.clientX, y: event.clientY, ...this.window }; });
    for (const name of ["pointerup", "pointerleave", "pointercancel"]) canvas.addEventListener(name, () => { held = null; });
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey || !this.isShown) return; // also what two fingers on a trackpad send
      event.preventDefault();
      const frame = canvas.getBoundingClientRect();
      this.zoom(event.deltaY > 0 ? 1.5 : 1 / 1.5, (event.clientX - frame.left) / frame.width, (event.clientY - frame.top) / frame.height);
    }, { passive: false });
    canvas.addEventListener("click", (event) => {
      const at = this.cellAt(event);
      if (at && !this.second) set(at);
    });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
  }
}

// One head's weights as a picture that zooms and moves: each view is a rectangle asked for anew.

const MAP_PIXELS = 256; // where a pixel is several tokens
const WHOLE_TOKENS = 512; // so many tokens and fewer get a pixel each
const LEAST_TOKENS = 8;
const LEAST_LABEL = 11; // pixels that a token's name needs across
const LABEL_LENGTH = 80; // and along

class HeadMap {
  constructor(figure) {
    this.canvas = figure.querySelector("canvas");
    this.readout = figure.querySelector("figcaption");
    this.look = null;
    this.asked = 0;
    this.watch();
  }

  // Shows a head, all of it unless a part is in view already.
  show(look, layer, head) {
    const whole = this.look !== look;
    Object.assign(this, { look, layer, head });
    if (whole) this.window = { q: 0, k: 0, size: look.tokens.length };
    return this.draw();
  }

  get ends() {
    const { q, k, size } = this.window;
    const tokens = this.look.tokens.length;
    return { q0: q, k0: k, q1: Math.min(tokens, q + size), k1: Math.min(tokens, k + size) };
  }

  async draw() {
    const asked = ++this.asked;
    const { q0, q1, k0, k1 } = this.ends;
    const longest = Math.max(q1 - q0, k1 - k0);
    const pixels = longest <= WHOLE_TOKENS ? WHOLE_TOKENS : MAP_PIXELS;
    const words = new URLSearchParams({ q0, q1, k0, k1, pixels });
    const address = `region/${this.look.look}/${this.layer}/${this.head}?${words}`;
    const { shape, values } = await askNumbers(address, Float32Array);
    if (asked !== this.asked) return; // a later view is on its way
    const [rows, columns] = shape;
    Object.assign(this, { rows, columns, values, cell: Math.ceil(longest / pixels) });
    this.repaint();
    this.tell();
  }

  repaint() {
    if (!this.values) return;
    const side = Math.max(this.rows, this.columns);
    this.canvas.width = this.canvas.height = side;
    const steps = Uint8Array.from(this.values, (x) => Math.round(255 * Math.sqrt(Math.min(1, x))));
    paint(this.canvas, steps, this.columns, this.rows);
    this.label(side);
  }

  // Tokens beside the map, where there is room for each.
  label(side) {
    const plot = this.canvas.parentElement;
    const width = Math.min(640, plot.clientWidth - LABEL_LENGTH);
    const room = this.cell === 1 && width / side >= LEAST_LABEL;
    plot.classList.toggle("labelled", room);
    const { q0, q1, k0, k1 } = this.ends;
    for (const [name, first, stop] of [["of-keys", k0, k1], ["of-queries", q0, q1]]) {
      const axis = plot.querySelector(`.${name}`);
      const words = room ? this.look.labels.slice(first, stop) : [];
      axis.style.setProperty("--count", side);
      axis.replaceChildren(...words.map((word) => element("span", { text: word })));
    }
  }

  // What lies under a point of the canvas, as shares 0..1 of its sides.
  at(x, y) {
    const side = Math.max(this.rows, this.columns);
    const [row, column] = [Math.floor(y * side), Math.floor(x * side)];
    if (!this.values || row < 0 || column < 0 || row >= this.rows || column >= this.columns) return null;
    return {
      query: this.window.q + row * this.cell, key: this.window.k + column * this.cell,
      weight: this.values[row * this.columns + column],
    };
  }

  tell(found = null) {
    const { q0, q1, k0, k1 } = this.ends;
    if (!found) {
      const ends = { q0, q1: q1 - 1, k0, k1: k1 - 1, cell: this.cell };
      this.readout.textContent = t(this.cell > 1 ? "part_cells" : "part", ends);
      return;
    }
    const token = (i) => `${this.look.shown[i]} (${i})`;
    const said = { query: token(found.query), key: token(found.key), weight: found.weight.toPrecision(4) };
    this.readout.textContent = t(this.cell > 1 ? "told_near" : "told", said);
  }

  zoom(factor, x = 0.5, y = 0.5) {
    const tokens = this.look.tokens.length;
    const size = Math.round(Math.max(Math.min(LEAST_TOKENS, tokens), Math.min(tokens, this.window.size * factor)));
    const change = this.window.size - size;
    this.move({ q: this.window.q + y * change, k: this.window.k + x * change, size });
  }

  move({ q, k, size = this.window.size }) {
    const last = this.look.tokens.length - size;
    const inside = (start) => Math.round(Math.max(0, Math.min(last, start)));
    const next = { q: inside(q), k: inside(k), size };
    const { window } = this;
    if (next.q === window.q && next.k === window.k && next.size === window.size) return;
    this.window = next;
    run(this.draw());
    drawLines();
  }

  watch() {
    const share = (event) => {
      const box = this.canvas.getBoundingClientRect();
      return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
    };
    let held = null;
    this.canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.5 : 1 / 1.5, ...share(event));
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      held = { from: share(event), ...this.window };
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      const [x, y] = share(event);
      if (held) this.move({ q: held.q - (y - held.from[1]) * held.size, k: held.k - (x - held.from[0]) * held.size });
      this.tell(this.at(x, y));
    });
    this.canvas.addEventListener("pointerup", () => { held = null; });
    this.canvas.addEventListener("pointerleave", () => this.look && this.tell());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const { q, k, size } = this.window;
    const by = Math.max(1, Math.round(size / 8));
    const action = {
      "+": () => this.zoom(1 / 1.5), "=": () => this.zoom(1 / 1.5), "-": () => this.zoom(1.5),
      0: () => this.move({ q: 0, k: 0, size: this.look.tokens.length }),
      ArrowLeft: () => this.move({ q, k: k - by }), ArrowRight: () => this.move({ q, k: k + by }),
      ArrowUp: () => this.move({ q: q - by, k }), ArrowDown: () => this.move({ q: q + by, k }),
    }[event.key];
    if (!action || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    action();
  }
}

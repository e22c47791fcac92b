// A look: one model on one text. What is asked of it is there at once, or null while it is on its way;
// when it arrives, all that shows it is drawn again.

const WHOLE_TOKENS = 512; // of so many tokens a side and fewer all weights of a head are kept
const MOST_KEPT = 60; // answers that are kept

const LETTERS = { layer: "", encoder: "E", decoder: "D", cross: "C" };

class Look {
  /** @type {Numbers[]} */
  statistics = []; // of each layer, once measured

  /** @type {Map<string, any>} */
  answers = new Map(); // undefined: refused

  /** @param {LookHeader} header @param {Source} source */
  constructor(header, source) {
    const { way, statistics, ...known } = header; // asked of the source, a token and a layer at a time
    Object.assign(this, known);
    this.source = source;
    this.tokens = known.tokens;
    this.layers = known.layers;
    this.statisticNames = statistics ? Object.keys(statistics) : null;
    this.length = this.tokens.length;
    /** @type {Head[]} */
    this.heads = this.layers.flatMap(({ heads }, layer) => Array.from({ length: heads }, (_, head) => ({ layer, head, index: 0 })));
    this.heads.forEach((head, index) => Object.assign(head, { index }));
    this.most = Math.max(...this.layers.map(({ heads }) => heads)); // heads of a layer
    this.firsts = this.layers.map((_, layer) => this.heads.findIndex((head) => head.layer === layer));
    this.read = 0; // layers whose weights, or small maps, are there
  }

  /** @param {number} layer @param {number} head */
  has(layer, head) {
    return layer >= 0 && layer < this.layers.length && head >= 0 && head < this.layers[layer].heads;
  }

  /** @param {number} layer @param {number} head */
  index(layer, head) {
    return this.firsts[layer] + head;
  }

  // ---- names ----

  /** @param {number} layer */
  layerShort(layer) {
    const { part, number } = this.layers[layer];
    return `${LETTERS[part]}${number}`;
  }

  /** @param {number} layer */
  layerName(layer) {
    const { part, number } = this.layers[layer];
    return part === "layer" ? t("layer", { layer: number }) : told(`part_${part}`, part).replace("{number}", String(number));
  }

  /** @param {number} layer @param {number} head */
  headName(layer, head) {
    return `${this.layerShort(layer)}.${head}`;
  }

  /** @param {number} layer @param {number} head */
  kvHead(layer, head) {
    const { heads, kvHeads } = this.layers[layer];
    return Math.floor(head / (heads / kvHeads));
  }

  /** @param {number} layer */
  sharesKeys(layer) {
    return this.layers[layer].kvHeads < this.layers[layer].heads;
  }

  // ---- which tokens a layer's queries and keys are ----

  /** @param {number} layer @param {number} token */
  isQuery(layer, token) {
    const [first, stop] = this.layers[layer].queries;
    return token >= first && token < stop;
  }

  /** @param {number} layer @param {number} token */
  isKey(layer, token) {
    const [first, stop] = this.layers[layer].keys;
    return token >= first && token < stop;
  }

  /** @param {number} layer */
  sides(layer) {
    const { queries, keys } = this.layers[layer];
    return { rows: queries[1] - queries[0], columns: keys[1] - keys[0] };
  }

  /** @param {number} layer */
  isShort(layer) {
    const { rows, columns } = this.sides(layer);
    return Math.max(rows, columns) <= WHOLE_TOKENS;
  }

  // ---- numbers ----

  // `kind` says who draws it: parts, rows, pairs, products, ways.
  /** @param {"parts" | "rows" | "pairs" | "products" | "ways"} kind @param {string} name @param {() => any} make */
  answer(kind, name, make) {
    if (this.answers.has(name)) return this.answers.get(name);
    const made = make();
    if (made === null) return null;
    this.answers.set(name, made instanceof Promise ? null : made);
    if (this.answers.size > MOST_KEPT) this.answers.delete([...this.answers.keys()][0]);
    if (!(made instanceof Promise)) return made;
    awaited(made, kind).then((value) => this.answers.set(name, value), (error) => {
      this.answers.delete(name);
      if (!(error instanceof Refusal)) throw error;
      this.answers.set(name, undefined); // asked once, not again and again
      say(error.message);
    });
    return null;
  }

  // A rectangle of weights, its ends counted in the layer: { rows, columns, cell, values }.
  /** @param {number} layer @param {number} head @param {Ends} ends @param {number} pixels */
  part(layer, head, ends, pixels) {
    if (!this.source.isThere(layer)) return null;
    const name = `part ${layer}.${head} ${Object.values(ends)} ${pixels}`;
    if (this.source.weight || !this.isShort(layer)) {
      return this.answer("parts", name, () => this.source.part(layer, head, ends, pixels)) ?? null;
    }
    const whole = this.whole(layer, head);
    return whole && this.answer("parts", name, () => reduced(whole.columns, whole.values, ends, pixels));
  }

  /** @param {number} layer @param {number} head */
  whole(layer, head) {
    const { rows, columns } = this.sides(layer);
    const ends = { q0: 0, q1: rows, k0: 0, k1: columns };
    return this.answer("parts", `whole ${layer}.${head}`, () => this.source.part(layer, head, ends, WHOLE_TOKENS)) ?? null;
  }

  // A token's weights on all keys of the layer; null also where it is no query of it.
  /** @param {number} layer @param {number} head @param {number} token */
  row(layer, head, token) {
    if (!this.isQuery(layer, token) || !this.source.isThere(layer)) return null;
    const query = token - this.layers[layer].queries[0];
    if (this.source.weight) return this.source.row(layer, head, query);
    if (!this.isShort(layer)) {
      return this.answer("rows", `row ${layer}.${head} ${query}`, () => this.source.row(layer, head, query)) ?? null;
    }
    const map = this.whole(layer, head);
    return map && map.values.subarray(query * map.columns, (query + 1) * map.columns);
  }

  /** @param {number} layer @param {number} head @param {number} token */
  column(layer, head, token) {
    if (!this.isKey(layer, token) || !this.source.isThere(layer)) return null;
    const key = token - this.layers[layer].keys[0];
    if (this.source.weight) return this.source.column(layer, head, key);
    if (!this.isShort(layer)) {
      return this.answer("rows", `column ${layer}.${head} ${key}`, () => this.source.column(layer, head, key)) ?? null;
    }
    const map = this.whole(layer, head);
    return map && Float32Array.from({ length: map.rows }, (_, row) => map.values[row * map.columns + key]);
  }

  // The weight of one token on another; null where it is not known, or the layer does not have it.
  /** @param {number} layer @param {number} head @param {number} query @param {number} key */
  weight(layer, head, query, key) {
    if (!this.isQuery(layer, query) || !this.isKey(layer, key) || !this.source.isThere(layer)) return null;
    const { queries, keys } = this.layers[layer];
    if (this.source.weight) return this.source.weight(layer, head, query - queries[0], key - keys[0]);
    return this.row(layer, head, query)?.[key - keys[0]] ?? null;
  }

  // The weight of one token on another in every head, NaN where a layer does not have it.
  /** @param {number} query @param {number} key */
  pair(query, key) {
    if (!this.length) return null;
    return this.answer("pairs", `pair ${query} ${key}`, () => this.source.pair(query, key)) ?? null;
  }

  /** @param {number} layer @param {number} head @param {boolean} hideFirst */
  small(layer, head, hideFirst) {
    return this.source.isThere(layer) ? this.source.small(layer, head, hideFirst) : null;
  }

  /** @param {number} layer @param {number} head @param {number} query @param {number} key */
  product(layer, head, query, key) {
    if (!this.isQuery(layer, query) || !this.isKey(layer, key) || !this.source.isThere(layer)) return null;
    const { queries, keys } = this.layers[layer];
    const [row, column] = [query - queries[0], key - keys[0]];
    return this.answer("products", `product ${[layer, head, row, column]}`, () => this.source.product(layer, head, row, column)) ?? null;
  }

  /** @param {number} token */
  way(token) {
    if (token < this.own || token >= this.length) return null;
    return this.answer("ways", `way ${token}`, () => this.source.way(token)) ?? null;
  }

  // Another look has taken its place: nothing is asked for any more.
  leave() {
    this.source.gone = true;
  }
}

// A rectangle of a matrix of `columns`: the largest number of each cell, at most `pixels` cells a side.
/** @param {number} columns @param {Float32Array} values @param {Ends} ends @param {number} pixels */
function reduced(columns, values, { q0, q1, k0, k1 }, pixels) {
  const cell = Math.max(1, Math.ceil(Math.max(q1 - q0, k1 - k0) / pixels));
  const [high, wide] = [Math.ceil((q1 - q0) / cell), Math.ceil((k1 - k0) / cell)];
  const found = new Float32Array(high * wide);
  for (let query = q0; query < q1; query++) {
    const start = Math.floor((query - q0) / cell) * wide;
    for (let key = k0; key < k1; key++) {
      const place = start + Math.floor((key - k0) / cell);
      found[place] = Math.max(found[place], values[query * columns + key]);
    }
  }
  return { rows: high, columns: wide, cell, values: found };
}

// ---- how tokens and heads are written; of the look that is shown ----

/** @param {number} layer @param {number} head */
const headName = (layer, head) => look.headName(layer, head);

// A token with signs for all that cannot be seen, and the same without its leading space, for axes.
/** @param {number} index */
const visible = (index) => look.shown[index];
/** @param {number} index */
const label = (index) => look.labels[index];

// Words from right to left do not turn the line around them.
/** @param {string} text */
const apart = (text) => (/[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}]/u.test(text) ? `\u2068${text}\u2069` : text);

// ---- numbers as people read them ----

// The fewest digits that name this float32 and no other.
/** @param {number} value */
function exact(value) {
  if (value === null) return "…";
  for (let digits = 1; digits < 10; digits++) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(value);
}

/** @param {number} value */
function short(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && size < 0.001 ? value.toExponential(1) : value.toFixed(size < 10 ? 3 : size < 100 ? 2 : 1);
  return text.replaceAll("-", "−");
}

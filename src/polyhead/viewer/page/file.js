// A look whose data stand in this file. Every answer is there at once; null until its layer is read.

class FileSource {
  /** @param {FileHeader} header */
  constructor(header) {
    this.header = header;
    /** @type {(Float32Array | Uint16Array)[]} */
    this.weights = []; // of each layer, once read
    /** @type {Float32Array[]} */
    this.vectors = [];
    this.lookup = header.half ? halves() : null;
  }

  // Reads every layer in turn and tells `arrived(layer)`.
  /** @param {(layer: number) => void} arrived */
  async read(arrived) {
    if (!("DecompressionStream" in window)) throw new Error(t("too_old"));
    const { layers, block } = this.header;
    for (const [layer, about] of layers.entries()) {
      const buffer = await unpacked(`weights-${block + layer}`);
      const values = buffer && (this.lookup ? new Uint16Array(buffer) : new Float32Array(buffer));
      if (values?.length !== about.heads * this.perHead(about)) throw new Error(t("damaged", { layer }));
      this.weights[layer] = values;
      arrived(layer);
    }
    if (!this.header.vectors) return;
    for (const layer of layers.keys()) {
      const buffer = await unpacked(`vectors-${block + layer}`);
      if (!buffer) throw new Error(t("damaged", { layer }));
      this.vectors[layer] = new Float32Array(buffer);
    }
  }

  /** @param {Layer} about */
  perHead({ triangle, queries, keys }) {
    const [rows, columns] = [queries[1] - queries[0], keys[1] - keys[0]];
    return triangle ? (rows * (rows + 1)) / 2 : rows * columns;
  }

  /** @param {number} layer */
  isThere(layer) {
    return Boolean(this.weights[layer]);
  }

  // Queries and keys are counted from 0 in their layer here, as in all of a source's functions.
  /** @param {number} layer @param {number} head @param {number} query @param {number} key */
  weight(layer, head, query, key) {
    const about = this.header.layers[layer];
    if (about.triangle && key > query) return 0;
    const row = about.triangle ? (query * (query + 1)) / 2 : query * (about.keys[1] - about.keys[0]);
    const value = this.weights[layer][head * this.perHead(about) + row + key];
    return this.lookup ? this.lookup[value] : value;
  }

  /** @param {number} layer @param {number} head @param {number} query */
  row(layer, head, query) {
    const { keys } = this.header.layers[layer];
    return Float32Array.from({ length: keys[1] - keys[0] }, (_, key) => this.weight(layer, head, query, key));
  }

  /** @param {number} layer @param {number} head @param {number} key */
  column(layer, head, key) {
    const { queries } = this.header.layers[layer];
    return Float32Array.from({ length: queries[1] - queries[0] }, (_, query) => this.weight(layer, head, query, key));
  }

  /** @param {number} layer @param {number} head @param {Ends} ends @param {number} pixels */
  part(layer, head, ends, pixels) {
    const { keys } = this.header.layers[layer];
    return reduced(keys[1] - keys[0], this.rows(layer, head, ends), ends, pixels);
  }

  // A head's weights row by row, those of some queries.
  /** @param {number} layer @param {number} head @param {{ q0: number, q1: number }} ends */
  rows(layer, head, { q0, q1 }) {
    const { keys } = this.header.layers[layer];
    const columns = keys[1] - keys[0];
    const values = new Float32Array(q1 * columns);
    for (let query = q0; query < q1; query++) {
      for (let key = 0; key < columns; key++) values[query * columns + key] = this.weight(layer, head, query, key);
    }
    return values;
  }

  // A head as a small map. Without the first key, rows are shares of what is left.
  /** @param {number} layer @param {number} head @param {boolean} hideFirst */
  small(layer, head, hideFirst) {
    const { queries, keys } = this.header.layers[layer];
    const [rows, columns] = [queries[1] - queries[0], keys[1] - keys[0]];
    const map = this.part(layer, head, { q0: 0, q1: rows, k0: 0, k1: columns }, Math.max(rows, columns));
    if (hideFirst) withoutFirst(map);
    return map;
  }

  /** @param {number} query @param {number} key */
  pair(query, key) {
    if (!this.isThere(this.header.layers.length - 1)) return null;
    return Float32Array.from(this.header.layers.flatMap(({ heads, queries, keys }, layer) => {
      const inside = query >= queries[0] && query < queries[1] && key >= keys[0] && key < keys[1];
      return Array.from({ length: heads }, (_, head) =>
        inside ? this.weight(layer, head, query - queries[0], key - keys[0]) : NaN);
    }));
  }

  /** @param {number} layer */
  statistics(layer) {
    return Object.fromEntries(Object.entries(this.header.statistics).map(([name, rows]) => [name, rows[layer]]));
  }

  // The query, the key, the raw scores q·k of all keys, and the scores that softmax sees.
  /** @param {number} layer @param {number} head @param {number} query @param {number} key */
  product(layer, head, query, key) {
    const numbers = this.vectors[layer];
    if (!numbers) return null;
    const { heads, kvHeads, queries, keys, size = 0 } = this.header.layers[layer];
    const [rows, columns] = [queries[1] - queries[0], keys[1] - keys[0]];
    const behind = heads * rows * size;
    const kvHead = Math.floor(head / (heads / kvHeads));
    const q = numbers.subarray((head * rows + query) * size, (head * rows + query + 1) * size);
    /** @param {number} i */
    const keyOf = (i) => numbers.subarray(behind + (kvHead * columns + i) * size, behind + (kvHead * columns + i + 1) * size);
    const lse = numbers[behind + kvHeads * columns * size + head * rows + query];
    const raw = Float32Array.from({ length: columns }, (_, i) => keyOf(i).reduce((sum, x, d) => sum + x * q[d], 0));
    const scores = this.row(layer, head, query).map((weight) => (weight > 0 ? Math.log(weight) + lse : -Infinity));
    return { q, k: keyOf(key), raw, scores };
  }

  /** @param {number} token */
  way(token) {
    return this.header.way?.[token - this.header.own] ?? null;
  }
}

// Blanks the first key of a map, and makes rows shares of the rest.
/** @param {{ rows: number, columns: number, values: Float32Array }} map */
function withoutFirst({ rows, columns, values }) {
  for (let row = 0; row < rows; row++) {
    const line = values.subarray(row * columns, (row + 1) * columns);
    line[0] = 0;
    const rest = line.reduce((sum, x) => sum + x, 0);
    if (rest > 0) for (let i = 1; i < columns; i++) line[i] /= rest;
  }
}

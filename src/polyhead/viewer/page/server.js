// A look that the server keeps which sent this page. It is asked for each part when that is shown.

class Refusal extends Error {}

/** @param {string} address @param {unknown} [body] @param {AbortSignal} [signal] */
async function ask(address, body, signal) {
  const options = body === undefined ? { signal } : { method: "POST", body: JSON.stringify(body), signal };
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    if (signal?.aborted) throw new Refusal(t("cancelled"));
    throw new Refusal(t("no_answer"));
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let reason = text;
  try {
    reason = JSON.parse(text).error;
  } catch {
    // A plain sentence.
  }
  throw new Refusal(reason || t("answered", { status: answer.status }));
}

/** @param {string} address @param {unknown} [body] @param {AbortSignal} [signal] */
const askJson = async (address, body, signal) => (await ask(address, body, signal)).json();

// The numbers of an answer and their shape.
/** @type {(address: string, Kind?: Float32ArrayConstructor | Uint8ArrayConstructor) => Promise<{ shape: number[], values: any }>} */
async function askNumbers(address, Kind = Float32Array) {
  const answer = await ask(address);
  const shape = /** @type {string} */ (answer.headers.get("X-Shape")).split(",").map(Number);
  return { shape, values: new Kind(await answer.arrayBuffer()) };
}

// Large enough to read, small enough that all heads together stay far below 2 MB.
/** @param {number} heads */
const thumbPixels = (heads) => Math.max(16, Math.min(48, Math.floor(Math.sqrt(1.2e6 / heads))));

// Of a byte of a small map, 255 √weight, the weight.
const SQUARES = Float32Array.from({ length: 256 }, (_, byte) => (byte / 255) ** 2);

class ServerSource {
  /** @param {LookHeader} header */
  constructor(header) {
    this.header = header;
    this.pixels = thumbPixels(header.layers.reduce((sum, { heads }) => sum + heads, 0));
    this.thumbs = new Map(); // "shown 3" or "hidden 3": the answer, or its promise
    this.gone = false;
  }

  // Small maps of all layers, two at a time, then the statistics, a layer after the other.
  /** @param {(layer: number) => void} arrived */
  async read(arrived) {
    const layers = [...this.header.layers.keys()];
    /** @type {Promise<any> | null} */
    let coming = this.thumbnails(layers[0], false);
    for (const layer of layers) {
      const next = layer + 1 < layers.length ? this.thumbnails(layer + 1, false) : null;
      next?.catch(() => {}); // a refusal is met when its turn comes
      await coming;
      coming = next;
      if (this.gone) return;
      arrived(layer);
    }
  }

  /** @param {number} layer @param {boolean} hideFirst */
  thumbnails(layer, hideFirst) {
    const name = `${hideFirst ? "hidden" : "shown"} ${layer}`;
    if (!this.thumbs.has(name)) {
      const words = new URLSearchParams({ pixels: String(this.pixels), first: hideFirst ? "hidden" : "shown" });
      const asked = askNumbers(`thumbnails/${this.header.look}/${layer}?${words}`, Uint8Array);
      this.thumbs.set(name, asked);
      asked.then((found) => this.thumbs.set(name, found), () => this.thumbs.delete(name));
    }
    return Promise.resolve(this.thumbs.get(name));
  }

  /** @param {number} layer @param {number} head @param {boolean} hideFirst */
  small(layer, head, hideFirst) {
    const found = this.thumbs.get(`${hideFirst ? "hidden" : "shown"} ${layer}`);
    if (!found?.shape) {
      if (hideFirst) this.thumbnails(layer, true).then(redrawThumbs, () => {});
      return null;
    }
    const [, rows, columns] = found.shape;
    const bytes = found.values.subarray(head * rows * columns, (head + 1) * rows * columns);
    const values = new Float32Array(bytes.length);
    for (let i = 0; i < bytes.length; i++) values[i] = SQUARES[bytes[i]];
    return { rows, columns, cell: 1, values };
  }

  isThere() {
    return true;
  }

  get place() {
    return this.header.look;
  }

  /** @param {number} layer @param {number} head @param {number} query */
  async row(layer, head, query) {
    return (await askNumbers(`row/${this.place}/${layer}/${head}/${query}`)).values;
  }

  /** @param {number} layer @param {number} head @param {number} key */
  async column(layer, head, key) {
    return (await askNumbers(`column/${this.place}/${layer}/${head}/${key}`)).values;
  }

  /** @param {number} layer @param {number} head @param {Ends} ends @param {number} pixels */
  async part(layer, head, ends, pixels) {
    const words = new URLSearchParams(Object.entries({ ...ends, pixels }).map(([name, value]) => [name, String(value)]));
    const { shape: [rows, columns], values } = await askNumbers(`region/${this.place}/${layer}/${head}?${words}`);
    const cell = Math.max(1, Math.ceil(Math.max(ends.q1 - ends.q0, ends.k1 - ends.k0) / pixels));
    return { rows, columns, cell, values };
  }

  /** @param {number} query @param {number} key */
  async pair(query, key) {
    return (await askNumbers(`pair/${this.place}/${query}/${key}`)).values;
  }

  /** @param {number} layer */
  statistics(layer) {
    return askJson(`statistics/${this.place}/${layer}`);
  }

  /** @param {number} layer @param {number} head @param {number} query @param {number} key */
  async product(layer, head, query, key) {
    const { shape, values } = await askNumbers(`product/${this.place}/${layer}/${head}/${query}/${key}`);
    let from = 0;
    const [q, k, raw, scores] = shape.map((length) => values.subarray(from, (from += length)));
    return { q, k, raw, scores };
  }

  /** @param {number} token */
  way(token) {
    return askJson(`way/${this.place}/${token}`);
  }
}

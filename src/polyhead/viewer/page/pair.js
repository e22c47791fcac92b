// How the pair's weight comes about: the products q·k by dimension, the score, the softmax row.

const PAIR_KEYS = 12; // keys of the row that are listed
const PAIR_HEIGHT = 132;

const signed = (value) => `${value < 0 ? "−" : "+"}${short(Math.abs(value))}`;

function drawPairView() {
  const { layer, head, query, key } = state;
  if (!state.open || !look.has(layer, head)) return;
  const found = look.layers[layer].shares ? null : look.product(layer, head, query, key);
  const weights = look.row(layer, head, query);
  const first = look.layers[layer].keys[0];
  const isThere = Boolean(found && weights && look.isKey(layer, key));
  $("#pair-view").hidden = !isThere;
  $("#pair-missing").hidden = isThere;
  $("#pair-missing").textContent = isThere ? "" : pairMissing(layer);
  if (!isThere) return;
  const { q, k, raw, scores } = found;
  const here = key - first;
  const products = Float32Array.from(q, (x, d) => x * k[d]);
  drawProducts($("#pair-products"), { q, k, products });
  const largest = [...products.keys()].sort((a, b) => Math.abs(products[b]) - Math.abs(products[a])).slice(0, 6);
  $("#pair-largest").textContent = t("pair_largest", {
    list: largest.map((d) => `d${d} ${signed(products[d])}`).join(" · "), size: q.length,
  });
  $("#pair-steps").replaceChildren(...pairSteps({ raw: raw[here], score: scores[here], weight: weights[here], scores }));
  drawPairRow({ raw, scores, weights, here, first });
}

// Why there is nothing to show.
function pairMissing(layer) {
  if (!look.isQuery(layer, state.query) || !look.isKey(layer, state.key)) return t("pair_elsewhere");
  if (look.layers[layer].shares) return t("pair_shares");
  return look.vectors === false ? t("pair_left_out") : "…";
}

// "q·k = 13.2", "score = 1.65", "softmax: e^1.65 / Σ = 0.41": each a term with its number.
function pairSteps({ raw, score, weight, scores }) {
  const most = Math.max(...scores);
  const total = scores.reduce((sum, x) => sum + Math.exp(x - most), 0);
  const seen = Number.isFinite(score);
  const entries = [
    [t("pair_raw"), short(raw), "raw"],
    [t("pair_score"), seen ? short(score) : "−∞", "score"],
    [t("pair_softmax"), seen ? `e^(${short(score)} − ${short(most)}) / ${short(total)}` : t("pair_masked"), "softmax"],
    [t("pair_weight"), exact(weight), "weight"],
  ];
  return entries.map(([name, value, data]) => element("div", {}, [
    element("dt", { text: name }), element("dd", { text: value, data: `pair-${data}` }),
  ]));
}

// Three rows: the query and the key as cells, their products as bars up and down.
function drawProducts(box, { q, k, products }) {
  const width = pictureWidth(720);
  const [left, cell] = [44, (width - 48) / q.length];
  const most = Math.max(...products.map(Math.abs), 1e-9);
  const size = Math.max(...q.map(Math.abs), ...k.map(Math.abs), 1e-9);
  const [top, middle, half] = [40, 86, 42];
  const parts = [];
  const tipped = (node, d) => {
    node.append(svg("title", {}, `d${d}: ${short(q[d])} × ${short(k[d])} = ${signed(products[d])}`));
    parts.push(node);
  };
  const rowOf = (values, y) => values.forEach((x, d) => tipped(svg("rect", {
    x: (left + d * cell).toFixed(2), y, width: Math.max(0.5, cell - (cell > 4 ? 1 : 0)).toFixed(2), height: 15,
    class: x < 0 ? "is-negative" : "is-positive", "fill-opacity": (0.08 + 0.92 * Math.abs(x) / size).toFixed(3),
  }), d));
  rowOf([...q], 2);
  rowOf([...k], 20);
  products.forEach((x, d) => {
    const height = Math.abs(x) / most * half;
    tipped(svg("rect", {
      x: (left + d * cell).toFixed(2), y: (x < 0 ? middle : middle - height).toFixed(2),
      width: Math.max(0.5, cell - (cell > 4 ? 1 : 0)).toFixed(2), height: Math.max(0.5, height).toFixed(2),
      class: x < 0 ? "is-negative" : "is-positive",
    }), d);
  });
  parts.push(svg("line", { x1: left, x2: width - 4, y1: middle, y2: middle, class: "axis" }));
  [["q", 14], ["k", 32], ["q × k", middle + 4]].forEach(([text, y]) =>
    parts.push(svg("text", { x: left - 6, y, "text-anchor": "end" }, text)));
  box.setAttribute("viewBox", `0 0 ${width} ${PAIR_HEIGHT}`);
  box.setAttribute("aria-label", t("pair_picture", { query: label(state.query), key: label(state.key), size: q.length }));
  box.replaceChildren(...parts);
}

// The keys with the largest weights, and the pair's own: raw score, score, weight.
function drawPairRow({ raw, scores, weights, here, first }) {
  const order = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, PAIR_KEYS);
  if (!order.includes(here)) order.splice(-1, 1, here);
  $("#pair-row").replaceChildren(...order.map((i) => {
    const line = element("tr", {}, [
      element("th", { scope: "row" }, [element("bdi", { text: visible(first + i) })]),
      element("td", { text: short(raw[i]) }),
      element("td", { text: Number.isFinite(scores[i]) ? short(scores[i]) : "−∞" }),
      withBar(element("td", { classes: "sorted", text: exact(weights[i]) }), weights[i]),
    ]);
    line.classList.toggle("chosen", i === here);
    return line;
  }));
}

on(["layer", "head", "open", "query", "key", "products", "rows", "parts", "look"], drawPairView);

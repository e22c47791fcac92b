// Positions: without them order is lost; a rotation by hand.

const placed = { order: "same", rotate: false, query: 3, key: 1 };
const ORDERS = { same: [0, 1, 2], moved: [2, 0, 1] };
const THETA = 0.5; // radians a position
const PAIR = { q: [1, 0.5], k: [0.8, -0.3] };

// x with each pair of its numbers rotated by position · theta; theta falls from pair to pair.
function rotated(x, position, theta = 1, base = 10000) {
  return x.map((_, i) => {
    const pair = i - (i % 2);
    const angle = position * theta * base ** (-pair / x.length);
    return i % 2 ? x[pair] * Math.sin(angle) + x[pair + 1] * Math.cos(angle)
      : x[pair] * Math.cos(angle) - x[pair + 1] * Math.sin(angle);
  });
}

// Attention of the words in an order, and the outputs in the order of the words.
function inOrder(order, rotate) {
  const rows = order.map((i) => numbers.cross.target[i]);
  const turned = rows.map((row, place) => (rotate ? rotated(row, place) : row));
  const { out } = attend(turned, turned, rows);
  return out.map((_, i) => out[order.indexOf(i)]);
}

/** @param {number[]} ends @param {string} kind */
function arrow([x = 0, y = 0], kind) {
  return drawing("line", { x1: 0, y1: 0, x2: x.toFixed(3), y2: (-y).toFixed(3), class: kind });
}

scene("positions", (box) => {
  const shown = figure();
  function paint() {
    const order = ORDERS[placed.order];
    const words = order.map((i) => t("lesson.positions.word", { number: i + 1 }));
    const out = inOrder(order, placed.rotate);
    const before = inOrder(ORDERS.same, placed.rotate);
    const same = out.flat().every((x, i) => Math.abs(x - before.flat()[i]) < 1e-12);
    const q = rotated(PAIR.q, placed.query, THETA);
    const k = rotated(PAIR.k, placed.key, THETA);
    const score = (by) => matmul([rotated(PAIR.q, placed.query + by, THETA)], transpose([rotated(PAIR.k, placed.key + by, THETA)]))[0][0];
    fill(shown,
      paragraph(t("lesson.positions.read", { words: words.join(" ") }), "caption"),
      product(matrix({ name: t("lesson.positions.out"), values: out, rows: out.map((_, i) => t("lesson.positions.word", { number: i + 1 })) })),
      live(t(same ? "lesson.positions.same" : "lesson.positions.other"), "positions-said"),
      element("h3", { text: t("lesson.positions.hand") }),
      paragraph(t("lesson.positions.hand_text", { theta: THETA })),
      controls(
        slider(t("lesson.positions.query"), { least: 0, most: 12, value: placed.query, data: "positions-query", changed: (n) => { placed.query = n; paint(); } }),
        slider(t("lesson.positions.key"), { least: 0, most: 12, value: placed.key, data: "positions-key", changed: (n) => { placed.key = n; paint(); } }),
      ),
      product(
        drawing("svg", { viewBox: "-1.3 -1.3 2.6 2.6", class: "dial", role: "img", "aria-label": t("lesson.positions.dial") }, [
          drawing("circle", { r: 1.12, cx: 0, cy: 0 }), arrow(PAIR.q, "was query"), arrow(PAIR.k, "was held"), arrow(q, "query"), arrow(k, "held"),
        ]),
        element("div", {}, [
          paragraph(`q = [${PAIR.q.map(written).join(", ")}] → [${q.map(written).join(", ")}]  (${(placed.query * THETA).toFixed(1)} rad)`, "few query"),
          paragraph(`k = [${PAIR.k.map(written).join(", ")}] → [${k.map(written).join(", ")}]  (${(placed.key * THETA).toFixed(1)} rad)`, "few held"),
        ]),
      ),
      live(t("lesson.positions.score", { score: written(score(0)), later: written(score(1)), distance: placed.query - placed.key }), "positions-score"));
  }
  box.replaceChildren(
    controls(
      choice(t("lesson.positions.order"), Object.keys(ORDERS).map((key) => [key, ORDERS[key].map((i) => i + 1).join(" ")]),
        placed.order, (order) => {
          placed.order = order;
          paint();
        }, "positions-order"),
      switcher(t("lesson.positions.rotate"), placed.rotate, (on) => {
        placed.rotate = on;
        paint();
      }, "positions-rotate"),
    ),
    shown,
  );
  paint();
});

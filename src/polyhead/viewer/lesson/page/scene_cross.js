// Self- and cross-attention: the same formula, keys and values from elsewhere.

const across = { cross: false };

scene("cross", (box) => {
  const shown = figure();
  const { target, source, words } = numbers.cross;
  const weights = numbers.example.weights;
  function paint() {
    const other = across.cross ? source : target;
    const q = matmul(target, weights.Q);
    const found = attend(q, matmul(other, weights.K), matmul(other, weights.V));
    const rows = words.target[language];
    const columns = across.cross ? words.source[language] : rows;
    fill(shown,
      lines(rows, columns, found.weights),
      product(
        matrix({ name: t("lesson.cross.weights"), values: found.weights, rows, columns, shade: true }),
        sign("·"), matrix({ name: "V", values: matmul(other, weights.V), rows: columns }),
        sign("="), matrix({ name: t("lesson.cross.out"), values: found.out, rows }),
      ),
      live(t(across.cross ? "lesson.cross.said_cross" : "lesson.cross.said_self", {
        queries: rows.length, keys: columns.length,
      }), "cross-said"));
  }
  box.replaceChildren(
    controls(choice(t("lesson.cross.choice"), [[false, t("lesson.cross.self")], [true, t("lesson.cross.cross")]],
      across.cross, (cross) => {
        across.cross = cross;
        paint();
      }, "cross-kind")),
    shown,
  );
  paint();
});

// Two columns of words with a line for each weight, as thick as the weight.
function lines(left, right, weights) {
  const height = 30 * Math.max(left.length, right.length);
  const y = (i, count) => ((i + 0.5) * height) / count;
  const word = (text, x, at, anchor) => drawing("text", { x, y: at + 4, "text-anchor": anchor, text });
  return drawing("svg", { viewBox: `0 0 320 ${height}`, class: "lines", "aria-hidden": "true" }, [
    ...weights.flatMap((row, i) => row.map((x, j) => drawing("line", {
      x1: 112, y1: y(i, left.length), x2: 208, y2: y(j, right.length), "stroke-width": (6 * x).toFixed(2),
    }))),
    ...left.map((text, i) => word(text, 104, y(i, left.length), "end")),
    ...right.map((text, j) => word(text, 216, y(j, right.length), "start")),
  ]);
}

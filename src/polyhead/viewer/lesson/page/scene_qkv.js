// Query, key and value: what one token asks, offers and carries. The input can be changed.

const asked = { x: numbers.example.x.map((row) => [...row]), token: 0 };

scene("qkv", (box) => {
  const words = numbers.example.words[language];
  const shown = figure();
  const projections = [["Q", "query"], ["K", "key"], ["V", "value"]];
  function paint() {
    const made = projections.map(([letter, key]) => {
      const weights = numbers.example.weights[letter];
      const values = matmul(asked.x, weights);
      return product(
        sign("X ·"), matrix({ name: `W_${letter}`, values: weights }), sign("="),
        matrix({ name: letter, values, rows: words, lit: (i) => (i === asked.token ? "row" : "") }),
        paragraph(t(`lesson.qkv.${key}`, { word: words[asked.token], numbers: values[asked.token].map(written).join(", ") })),
      );
    });
    fill(shown, ...made);
  }
  const columns = numbers.example.x[0].map((_, j) => `x${"₁₂₃₄"[j]}`);
  box.replaceChildren(
    controls(
      choice(t("lesson.qkv.token"), words.map((word, i) => [i, word]), asked.token, (i) => {
        asked.token = i;
        paint();
      }, "qkv-token"),
    ),
    matrix({
      name: "X", values: asked.x, rows: words, columns,
      change: (i, j, value) => {
        asked.x[i][j] = value;
        paint();
      },
    }),
    shown,
  );
  paint();
});

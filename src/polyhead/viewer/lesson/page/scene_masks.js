// Masks: who may look at whom, before softmax.

const masked = { kind: "causal", n: 3 };

scene("masks", (box) => {
  const shown = figure();
  const words = numbers.masks.words[language];
  const { query, keys } = numbers.masks;
  const needs = (kind) => ["window", "prefix", "documents", "padding"].includes(kind);
  function paint() {
    const visible = (i, j) => MASKS[masked.kind](i, j, masked.n);
    const { scores, weights } = attend(query, keys, keys, { visible });
    const hidden = sum(scores.map((row) => row.filter((x) => x === -Infinity).length));
    const lit = (i, j) => (visible(i, j) ? "" : "masked");
    fill(shown,
      product(
        matrix({ name: t("lesson.masks.scores"), values: scores, rows: words, columns: words, lit }), sign("→"),
        matrix({ name: t("lesson.masks.weights"), values: weights, rows: words, columns: words, lit, shade: true }),
      ),
      live(`${t(`lesson.masks.${masked.kind}`, { n: masked.n })} ${t("lesson.masks.hidden", { hidden, all: scores.length ** 2 })}`, "masks-said"),
    );
  }
  const width = slider("n", {
    least: 1, most: words.length, value: masked.n, data: "masks-n",
    changed: (n) => {
      masked.n = n;
      paint();
    },
  });
  width.hidden = !needs(masked.kind);
  box.replaceChildren(
    controls(
      choice(t("lesson.masks.choice"), Object.keys(MASKS).map((kind) => [kind, t(`lesson.masks.name.${kind}`)]),
        masked.kind, (kind) => {
          masked.kind = kind;
          width.hidden = !needs(kind);
          paint();
        }, "masks-kind"),
      width,
    ),
    shown,
  );
  paint();
});

// Scores, 1/√d_k and softmax: what happens without the factor.

const scaled = { size: 64, on: true };

// The first d numbers of a drawn query and keys, and the weights that they give.
function scaledWeights(size, on) {
  const { query, keys } = numbers.scaling;
  const q = [query.slice(0, size)];
  const k = keys.map((key) => key.slice(0, size));
  return attend(q, k, k, on ? {} : { scale: 1 });
}

scene("scores", (box) => {
  const shown = figure();
  function paint() {
    const { scores: [scores], weights: [weights] } = scaledWeights(scaled.size, scaled.on);
    const spread = Math.sqrt(sum(scores.map((x) => x * x)) / scores.length);
    const steepest = Math.max(...weights.map((p) => p * (1 - p)));
    const rows = weights.map((value, i) => ({
      name: t("lesson.scores.key", { number: i + 1 }), value,
      text: `${written(scores[i])} → ${written(value)}`, lit: value === Math.max(...weights),
    }));
    fill(shown,
      paragraph(t("lesson.scores.bars"), "caption"), bars(rows, 1),
      live(t("lesson.scores.said", {
        spread: spread.toFixed(2), root: Math.sqrt(scaled.size).toFixed(2),
        most: written(Math.max(...weights)), entropy: entropy(weights).toFixed(3),
        all: Math.log(weights.length).toFixed(3), slope: steepest.toExponential(1),
      }), "scores-said"));
  }
  box.replaceChildren(
    controls(
      slider("d_k", {
        least: 1, most: numbers.scaling.query.length, value: scaled.size, data: "scores-size",
        changed: (size) => {
          scaled.size = size;
          paint();
        },
      }),
      switcher(t("lesson.scores.scale"), scaled.on, (on) => {
        scaled.on = on;
        paint();
      }, "scores-scale"),
    ),
    shown,
  );
  paint();
});

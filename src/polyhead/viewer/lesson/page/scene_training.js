// Training: where four heads look before, during and after it.

const trained = { at: 0 };

scene("training", (box) => {
  const shown = figure();
  const moments = numbers.training;
  function paint() {
    const { step, loss, maps, w_q } = moments[trained.at];
    fill(shown,
      element("div", { classes: "maps" }, maps.map((weights, i) => {
        const name = t("lesson.training.map", { head: i + 1, step });
        return element("figure", { classes: "map" }, [heat(weights, name), element("figcaption", { text: name })]);
      })),
      live(t("lesson.training.said", { step, loss: written(loss), chance: Math.log(32).toFixed(3) }), "training-said"),
      paragraph(t("lesson.training.matrix"), "caption"),
      element("div", { classes: "corner-of" }, w_q.map((row) => strip(row.map((x) => 15 * x)))),
      paragraph(t("lesson.training.loss"), "caption"),
      bars(moments.map((each, i) => ({
        name: t("lesson.training.step", { step: each.step }), value: each.loss, text: written(each.loss), lit: i === trained.at,
      }))));
  }
  box.replaceChildren(
    controls(choice(t("lesson.training.choice"), moments.map(({ step }, i) => [String(i), t("lesson.training.step", { step })]),
      String(trained.at), (at) => {
        trained.at = Number(at);
        paint();
      }, "training-at")),
    shown,
  );
  paint();
});

// Why several heads: one head against four on a task that needs four.

const several = { heads: 1 };

scene("heads", (box) => {
  const shown = figure();
  const { rows, maps, tokens } = numbers.heads;
  const task = rows.filter(({ heads }) => heads <= 32);
  function paint() {
    const drawn = maps[several.heads].map((weights, i) => element("figure", { classes: "map" }, [
      heat(weights, t("lesson.heads.map", { head: i + 1, heads: several.heads })),
      element("figcaption", { text: t("lesson.heads.map", { head: i + 1, heads: several.heads }) }),
    ]));
    const said = rows.find(({ heads }) => heads === several.heads);
    const place = Object.keys(maps).map(Number).indexOf(several.heads);
    fill(shown,
      paragraph(t("lesson.heads.tokens", { tokens: tokens[place].join(" ") }), "caption"),
      element("div", { classes: "maps" }, drawn),
      live(t("lesson.heads.said", {
        heads: several.heads, each: percent(said.each), all: percent(said.all),
      }), "heads-said"),
      paragraph(t("lesson.heads.bars"), "caption"),
      bars(task.map(({ heads, all, least, most }) => ({
        name: t("lesson.heads.count", { heads, size: 64 / heads }), value: all,
        text: `${percent(all)} (${percent(least)} – ${percent(most)})`, lit: heads === several.heads,
      })), 1));
  }
  box.replaceChildren(
    controls(choice(t("lesson.heads.choice"), [[1, t("lesson.heads.one")], [4, t("lesson.heads.four")]],
      several.heads, (heads) => {
        several.heads = heads;
        paint();
      }, "heads-count")),
    shown,
  );
  paint();
});

const percent = (share) => `${(100 * share).toFixed(1)} %`;

// Weights as a picture: rows are queries, columns are keys, darker is more.
function heat(weights, name) {
  const side = weights.length;
  const cells = weights.flatMap((row, i) => row.map((x, j) => [x, i, j])).filter(([x]) => x > 0.004);
  return drawing("svg", { viewBox: `0 0 ${side} ${side}`, role: "img", "aria-label": name, class: "heat" },
    cells.map(([x, i, j]) => drawing("rect", { x: j, y: i, width: 1, height: 1, "fill-opacity": Math.sqrt(x).toFixed(3) })));
}

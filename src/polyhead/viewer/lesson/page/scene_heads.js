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

// Numbers from 0 on as a picture: rows are queries, columns are keys, darker is more. `columnHead` says
// whose colour a column has (0: no head's), `words` stand beside rows and columns, `mark` is a framed cell.
/**
 * @param {number[][]} values
 * @param {string} name
 * @param {{ most?: number, columnHead?: (column: number) => number, words?: string[], mark?: number[] | null }} options
 */
function heat(values, name, { most = 1, columnHead = () => 1, words = [], mark = null } = {}) {
  const [rows, columns] = [values.length, values[0].length];
  const margin = words.length ? 4.6 : 0;
  const cells = values.flatMap((row, i) => row.map((x, j) => [x / most, i, j])).filter(([x]) => x > 0.004);
  return drawing("svg", { viewBox: `${-margin} 0 ${columns + margin} ${rows + margin}`, role: "img", "aria-label": name, class: "heat" }, [
    ...cells.map(([x, i, j]) => drawing("rect", {
      x: j, y: i, width: 1, height: 1, class: `head${columnHead(j)}`, "fill-opacity": Math.sqrt(x).toFixed(3),
    })),
    ...words.flatMap((text, i) => [
      drawing("text", { x: -0.2, y: i + 0.75, "text-anchor": "end", text }),
      drawing("text", { x: -rows - 0.2, y: i + 0.75, "text-anchor": "end", transform: "rotate(-90)", text }),
    ]),
    ...(mark ? [drawing("rect", { x: mark[1], y: mark[0], width: 1, height: 1, class: "framed" })] : []),
  ]);
}

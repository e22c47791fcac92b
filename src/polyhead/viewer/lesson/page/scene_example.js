// The worked example: every step of two heads, and for every number the row and column that made it.

const worked = { step: 0, cell: [0, 0] };

// Which cells of a source made the chosen one.
function marks(kind, side) {
  const [row, column] = worked.cell;
  return {
    "product-left": (i) => (i === row ? "row" : ""), "product-right": (_, j) => (j === column ? "column" : ""),
    "cell-left": (i, j) => (i === row && j === column ? "cell" : ""), "row-left": (i) => (i === row ? "row" : ""),
    "share-left": (i, j) => (i === row && j === column ? "cell" : ""), "share-right": (i) => (i === row ? "row" : ""),
  }[`${kind}-${side}`] ?? (() => "");
}

// The chosen number as a sum, a quotient or a function of those that made it.
function working(step) {
  const [row, column] = worked.cell;
  const value = written(step.values[row][column]);
  const { kind, left, right, how } = step.made;
  if (kind === "product") {
    const terms = left.values[row].map((x, k) => `${written(x)} · ${written(right.values[k][column])}`);
    return `${terms.join(" + ")} = ${value}`;
  }
  if (kind === "cell") return `${how.replace("x", written(left.values[row][column]))} = ${value}`;
  if (kind === "row") return `${left.values[row].map(written).join(" + ")} = ${value}`;
  if (kind === "share") return `${written(left.values[row][column])} / ${written(right.values[row][0])} = ${value}`;
  if (kind === "part") return t("lesson.example.part", { head: column < left.values[0].length ? 1 : 2, value });
  return t("lesson.example.given", { value });
}

scene("example", (box) => {
  const { steps, words } = numbers.example;
  const rows = words[language];
  const shown = figure();
  const last = steps.length - 1;
  const perKey = (step) => ["QK", "scaled", "exp", "A"].includes(step.key.split(".")[1]);
  function go(step) {
    worked.step = Math.min(last, Math.max(0, step));
    worked.cell = [0, 0];
    select.value = String(worked.step);
    paint();
  }
  function paint() {
    const step = steps[worked.step];
    const { kind, left, right } = step.made;
    const source = (side, { name, values }) => matrix({
      name, values, lit: marks(kind, side), rows: side === "left" && kind !== "part" ? rows : [],
    });
    const parts = [];
    if (left) parts.push(source("left", left));
    if (left && right) parts.push(sign({ product: "·", share: "÷", part: "‖" }[kind]), source("right", right));
    if (left) parts.push(sign(kind === "cell" || kind === "row" ? "→" : "="));
    parts.push(matrix({
      name: step.name, values: step.values, rows, columns: perKey(step) ? rows : [],
      shade: step.key.endsWith(".A"), lit: (i, j) => (i === worked.cell[0] && j === worked.cell[1] ? "cell" : ""),
      chosen: worked.cell,
      choose: (i, j) => {
        worked.cell = [i, j];
        paint();
        $("td[tabindex='0']", shown)?.focus();
      },
    }));
    fill(shown,
      element("h3", { text: `${worked.step + 1}. ${step.titles[language]}`, data: "example-title" }),
      paragraph(step.formulas[language], "formula"),
      product(...parts), live(working(step), "example-working"),
      paragraph(t("lesson.path.about"), "caption"), pathOfHeads(steps, worked.step, go));
  }
  const select = element("select", { "aria-label": t("lesson.example.step"), data: "example-step" },
    steps.map((step, i) => element("option", { value: String(i), text: `${i + 1}. ${step.titles[language]}` })));
  select.value = String(worked.step);
  const move = (by) => go(worked.step + by);
  select.addEventListener("change", () => go(Number(select.value)));
  box.replaceChildren(
    controls(
      button(t("lesson.back"), () => move(-1), { data: "example-back" }), select,
      button(t("lesson.on"), () => move(1), { data: "example-on" }),
    ),
    shown,
  );
  paint();
});

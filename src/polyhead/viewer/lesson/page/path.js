// The way of the worked example through its heads, a picture for each step, the heads side by side.

// The picture that shows a step; steps of softmax and of the scores share one.
const PICTURED = { QK: "scaled", exp: "A", sum: "A" };

/**
 * @param {{ key: string, name: string, values: number[][], titles: Record<string, string> }[]} steps
 * @param {number} at the step that is marked
 * @param {(step: number) => void} go called with the step that is chosen
 */
function pathOfHeads(steps, at, go) {
  const [head, part] = steps[at].key.split(".");
  const current = part ? `${head}.${PICTURED[part] ?? part}` : head;
  const valuesOf = (key) => steps[steps.findIndex((step) => step.key === key)].values;
  const picture = (name, label, values, columnHead) => [
    heat(values, label, { most: Math.max(...values.flat()), columnHead }), element("span", {}, indexed(name)),
  ];
  const step = (key, columnHead) => {
    const place = steps.findIndex((each) => each.key === key);
    const { name, values, titles } = steps[place];
    const label = `${name}: ${titles[language]}`;
    const button = element("button", {
      type: "button", classes: "quiet", "aria-label": label, data: `path-${key}`, ...(key === current && { "aria-current": "step" }),
    }, picture(name, label, values, columnHead));
    button.addEventListener("click", () => go(place));
    return button;
  };
  const ofHead = (number, ...parts) => element("div", { classes: "sights" },
    parts.map((each) => step(`head${number}.${each}`, () => number)));
  const bothHeads = (...parts) => [ofHead(1, ...parts), ofHead(2, ...parts)];
  const size = valuesOf("head1.Q")[0].length;
  const byHead = (column) => (column < size ? 1 : 2);
  const joined = ["Q", "K", "V"].map((letter) => {
    const second = valuesOf(`head2.${letter}`);
    const values = valuesOf(`head1.${letter}`).map((row, i) => [...row, ...second[i]]);
    return element("span", { classes: "joined" }, picture(`${letter} = X W_${letter}`, `${letter} = X W_${letter}`, values, byHead));
  });
  const wide = (...parts) => [element("div", { classes: "sights wide" }, parts)];
  const stages = {
    project: wide(step("X", () => 0), ...joined), split: bothHeads("Q", "K", "V"), scores: bothHeads("scaled"),
    weights: bothHeads("A"), sum: bothHeads("out"), concat: wide(step("concat", byHead)), output: wide(step("output", () => 0)),
  };
  const box = element("div", { classes: "path", data: "path" }, Object.entries(stages).flatMap(([name, parts]) => [
    element("p", { classes: "caption", text: t(`lesson.path.${name}`) }), ...parts,
  ]));
  return box;
}

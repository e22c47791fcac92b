// FlashAttention: tiles move between slow and fast memory, and the bytes are counted.

const moved = { tokens: 2048, size: 64, side: 128, causal: true, step: 0, row: [1, 2, 0, 3, 1, 4, 2, 0], timer: 0 };

scene("flash", (box) => {
  const shown = figure();
  const bytes = 2;
  let visited = [];
  const stop = () => {
    clearInterval(moved.timer);
    moved.timer = 0;
    play.textContent = t("lesson.flash.play");
  };
  function show(step) {
    moved.step = Math.min(visited.length - 1, Math.max(0, step));
    $("input", time).value = moved.step;
    $("output", time).textContent = `${moved.step + 1} / ${visited.length}`;
    paint();
  }
  function paint() {
    const { tokens, size, side, causal, step } = moved;
    const { row, column } = visited[step];
    const total = traffic({ tokens, size, side, bytes, causal });
    const length = (block) => Math.min(side, tokens - block * side);
    const matrixOf = (blocks) => sum(blocks.map((block) => length(block) * size * bytes));
    const rowsOf = (count) => matrixOf(Array.from({ length: count }, (_, i) => i));
    const written = row + (visited[step + 1]?.row === row ? 0 : 1); // O is written once its row is done
    const sofar = 2 * matrixOf(visited.slice(0, step + 1).map((at) => at.column)) + rowsOf(row + 1) + rowsOf(written);
    fill(shown,
      element("div", { classes: "memories" }, [
        element("figure", {}, [tileMap(visited, step), element("figcaption", { text: t("lesson.flash.slow") })]),
        element("div", { classes: "fast" }, [
          element("h3", { text: t("lesson.flash.fast") }),
          bars([
            { name: `Q${row + 1}`, value: length(row) * size * bytes }, { name: `K${column + 1}`, value: length(column) * size * bytes },
            { name: `V${column + 1}`, value: length(column) * size * bytes }, { name: `S`, value: length(row) * length(column) * bytes },
            { name: `O${row + 1}, m, l`, value: length(row) * size * bytes, lit: true },
          ].map((entry) => ({ ...entry, text: bytesWritten(entry.value) }))),
        ]),
      ]),
      live(t("lesson.flash.step", { row: row + 1, column: column + 1, bytes: bytesWritten(sofar) }), "flash-step-said"),
      paragraph(t("lesson.flash.total"), "caption"),
      bars([
        { name: t("lesson.flash.whole"), value: total.whole, text: bytesWritten(total.whole) },
        { name: t("lesson.flash.tiled"), value: total.tiled, text: bytesWritten(total.tiled), lit: true },
      ]),
      live(t("lesson.flash.said", {
        times: (total.whole / total.tiled).toFixed(1), scores: bytesWritten(total.scores), held: bytesWritten(total.held),
      }), "flash-said"),
      element("h3", { text: t("lesson.flash.running") }),
      paragraph(t("lesson.flash.running_text")),
      runningTable());
  }
  function renewTiles() {
    stop();
    visited = tiles(moved);
    $("input", time).max = visited.length - 1;
    show(0);
  }
  const number = (name, key, values) => slider(name, {
    least: 0, most: values.length - 1, value: values.indexOf(moved[key]), say: (i) => counted(values[i]), data: `flash-${key}`,
    changed: (i) => {
      moved[key] = values[i];
      renewTiles();
    },
  });
  const time = slider(t("lesson.flash.time"), { least: 0, most: 1, value: 0, data: "flash-time", changed: (step) => show(step) });
  const play = button(t("lesson.flash.play"), () => {
    if (moved.timer) return stop();
    if (moved.step === visited.length - 1) show(0);
    play.textContent = t("lesson.flash.pause");
    moved.timer = setInterval(() => {
      show(moved.step + 1);
      if (moved.step === visited.length - 1) stop();
    }, 180);
    return undefined;
  }, { data: "flash-play" });
  box.replaceChildren(
    controls(
      number(t("lesson.flash.tokens"), "tokens", [256, 512, 1024, 2048, 4096]),
      number("d_k", "size", [32, 64, 128]),
      number(t("lesson.flash.side"), "side", [64, 128, 256]),
      switcher(t("lesson.masks.name.causal"), moved.causal, (causal) => {
        moved.causal = causal;
        renewTiles();
      }, "flash-causal"),
    ),
    controls(play, button(t("lesson.back"), () => { stop(); show(moved.step - 1); }), button(t("lesson.on"), () => { stop(); show(moved.step + 1); }, { data: "flash-on" }), time),
    shown,
  );
  renewTiles();
});

// The score matrix that never exists: tiles that are done, the one at work, those to come.
function tileMap(visited, step) {
  const count = Math.max(...visited.map(({ row }) => row)) + 1;
  const shade = (i) => (i < step ? "done" : i === step ? "now" : "later");
  return drawing("svg", { viewBox: `0 0 ${count} ${count}`, role: "img", class: "tiles", "aria-label": t("lesson.flash.slow") },
    visited.map(({ row, column }, i) => drawing("rect", { x: column + 0.04, y: row + 0.04, width: 0.92, height: 0.92, class: shade(i) })));
}

// One row of scores in tiles of two, with the numbers that are carried from tile to tile.
function runningTable() {
  const { scores, values } = numbers.flash;
  const states = online(scores, values, 2);
  const table = element("table", { classes: "matrix wide", data: "flash-running" }, [
    element("thead", {}, [element("tr", {}, ["lesson.flash.tile", "lesson.flash.scores"].map((key) => element("th", { scope: "col", text: t(key) }))
      .concat(["m", "l", "o", "o / l"].map((text) => element("th", { scope: "col", text }))))]),
    element("tbody", {}, states.map(({ m, l, o }, i) => element("tr", {}, [
      element("th", { scope: "row", text: String(i + 1) }),
      element("td", { text: scores.slice(2 * i, 2 * i + 2).map(written).join(", ") }),
      ...[m, l, o, o / l].map((x) => element("td", { text: written(x) })),
    ]))),
  ]);
  const weights = softmax(scores);
  const whole = sum(weights.map((p, i) => p * values[i]));
  return element("div", {}, [table, paragraph(t("lesson.flash.same", { out: written(whole) }))]);
}

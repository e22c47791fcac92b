// MHA, GQA, MQA, MLA: one picture of shared heads, and the cache as bars to scale.

const cached = { model: "llama-2-70b", tokens: 2, batch: 1, layout: "GQA" };
const DRAWN = 8; // query heads in the picture
const GROUPS = { MHA: 8, GQA: 2, MQA: 1, MLA: 0 };

const kindOf = (row) => row.name.split("-")[0];

scene("cache", (box) => {
  const shown = figure();
  const picture = figure();
  const models = numbers.caches;
  const of = () => models.find(({ name }) => name === cached.model);
  const step = () => Math.min(cached.tokens, of().tokens.length - 1);
  const bytesOf = (row) => row.bytes[step()] * cached.batch;
  function paintPicture() {
    const { layout } = cached;
    fill(picture, sharing(layout), live(t(`lesson.cache.${layout}`), "cache-layout-said"));
  }
  function paint() {
    const model = of();
    const own = model.rows.find(({ current }) => current);
    const most = model.rows.find(({ name }) => name === "MHA") ?? own;
    fill(shown,
      bars(model.rows.map((row) => ({
        name: row.name, value: bytesOf(row), lit: row.current,
        text: `${bytesWritten(bytesOf(row))} · ${t("lesson.cache.numbers", { count: counted(row.elements) })}`,
      }))),
      live(t("lesson.cache.said", {
        model: model.title, layout: own.name, tokens: counted(model.tokens[step()]), layers: model.layers,
        heads: model.heads, bytes: bytesWritten(bytesOf(own)), share: percent(bytesOf(own) / bytesOf(most)),
      }), "cache-said"));
  }
  const select = element("select", { id: "cache-model", data: "cache-model" },
    models.map(({ name, title }) => element("option", { value: name, text: title })));
  select.value = cached.model;
  const length = () => slider(t("lesson.cache.tokens"), {
    least: 0, most: of().tokens.length - 1, value: step(), data: "cache-tokens",
    say: (i) => counted(of().tokens[i]),
    changed: (i) => {
      cached.tokens = i;
      paint();
    },
  });
  let tokens = length();
  select.addEventListener("change", () => {
    cached.model = select.value;
    const next = length();
    tokens.replaceWith(next);
    tokens = next;
    paint();
  });
  box.replaceChildren(
    controls(choice(t("lesson.cache.layout"), Object.keys(GROUPS).map((name) => [name, name]), cached.layout, (name) => {
      cached.layout = name;
      paintPicture();
    }, "cache-layout")),
    picture,
    controls(
      element("div", { classes: "field" }, [element("label", { for: "cache-model", text: t("lesson.cache.model") }), select]),
      tokens,
      slider(t("lesson.cache.batch"), {
        least: 1, most: 64, value: cached.batch, data: "cache-batch",
        changed: (batch) => {
          cached.batch = batch;
          paint();
        },
      }),
    ),
    shown,
  );
  paintPicture();
  paint();
});

// Query heads above, what the cache holds below, a line from each head to what it reads.
function sharing(layout) {
  const groups = GROUPS[layout];
  const x = (i, count) => ((i + 0.5) * 400) / count;
  const label = (text, at, y) => drawing("text", { x: at, y, "text-anchor": "middle", text });
  const queries = Array.from({ length: DRAWN }, (_, i) => [
    drawing("circle", { cx: x(i, DRAWN), cy: 24, r: 15, class: "query" }), label(`Q${i + 1}`, x(i, DRAWN), 28),
  ]).flat();
  const held = layout === "MLA"
    ? [drawing("rect", { x: 130, y: 116, width: 90, height: 30, rx: 4, class: "held" }), label("c", 175, 136),
       drawing("rect", { x: 230, y: 116, width: 40, height: 30, rx: 4, class: "held" }), label("k_R", 250, 136)]
    : Array.from({ length: groups }, (_, g) => [
      drawing("rect", { x: x(g, groups) - 20, y: 116, width: 40, height: 30, rx: 4, class: "held" }),
      label(`K${groups > 1 ? g + 1 : ""} V${groups > 1 ? g + 1 : ""}`, x(g, groups), 136),
    ]).flat();
  const read = Array.from({ length: DRAWN }, (_, i) => {
    const goal = layout === "MLA" ? 200 : x(Math.floor((i * groups) / DRAWN), groups);
    return drawing("line", { x1: x(i, DRAWN), y1: 39, x2: goal, y2: 116, class: layout === "MLA" ? "made" : "" });
  });
  return drawing("svg", { viewBox: "0 0 400 156", role: "img", class: "sharing", "aria-label": t(`lesson.cache.${layout}`) },
    [...read, ...queries, ...held]);
}

// The stack of layers: every layer gives as many numbers as it takes, and others.

const stacked = { layer: 0, token: 0 };

scene("layers", (box) => {
  const shown = figure();
  const { layers, tokens, input, parameters, shape } = numbers.layers;
  function paint() {
    const at = layers[stacked.layer];
    const strips = [input, ...layers].map(({ values }, i) => element("div", { classes: `strip${i === stacked.layer + 1 ? " lit" : ""}` }, [
      element("span", { text: i ? t("lesson.layers.after", { layer: i }) : "X" }), strip(values[stacked.token]),
    ]));
    fill(shown,
      element("div", { classes: "strips" }, strips),
      paragraph(t("lesson.layers.added"), "caption"),
      bars([
        { name: t("lesson.layers.attention"), value: at.attention[stacked.token], text: written(at.attention[stacked.token]) },
        { name: "FFN", value: at.network[stacked.token], text: written(at.network[stacked.token]) },
        { name: t("lesson.layers.path"), value: at.path[stacked.token], text: written(at.path[stacked.token]), lit: true },
      ]),
      live(t("lesson.layers.said", {
        layer: stacked.layer + 1, shape: shape.join(" × "), mean: written(at.mean), std: written(at.std),
        alike: written(at.alike[stacked.token]),
      }), "layers-said"),
      paragraph(t("lesson.layers.parameters", {
        each: counted(parameters.each), layers: layers.length, all: counted(parameters.each * layers.length),
      })),
      modelTable());
  }
  box.replaceChildren(
    controls(
      slider(t("lesson.layers.layer"), {
        least: 1, most: layers.length, value: stacked.layer + 1, data: "layers-layer",
        changed: (layer) => {
          stacked.layer = layer - 1;
          paint();
        },
      }),
      slider(t("lesson.layers.token"), {
        least: 1, most: tokens, value: stacked.token + 1, data: "layers-token",
        changed: (token) => {
          stacked.token = token - 1;
          paint();
        },
      }),
    ),
    shown,
  );
  paint();
});

// Numbers as cells from blue (below 0) to amber (above).
function strip(values) {
  return drawing("svg", { viewBox: `0 0 ${values.length} 2`, class: "numbers", "aria-hidden": "true", preserveAspectRatio: "none" },
    values.map((x, i) => drawing("rect", {
      x: i, y: 0, width: 1, height: 2, class: x < 0 ? "below" : "above", "fill-opacity": Math.min(1, Math.abs(x) / 2.5).toFixed(2),
    })));
}

function modelTable() {
  const head = ["model", "layers", "heads", "width", "size"];
  return element("div", { classes: "scroll", tabindex: "0", role: "region", "aria-label": t("lesson.layers.models") }, [element("table", { classes: "matrix wide" }, [
    element("caption", { text: t("lesson.layers.models") }),
    element("thead", {}, [element("tr", {}, head.map((key) => element("th", { scope: "col", text: t(`lesson.layers.column.${key}`) })))]),
    element("tbody", {}, numbers.models.map((model) => element("tr", {}, [
      element("th", { scope: "row", text: model.title }),
      ...["layers", "heads", "width", "size"].map((key) => element("td", { "data-label": t(`lesson.layers.column.${key}`), text: counted(model[key]) })),
    ]))),
  ])]);
}

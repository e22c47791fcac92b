// The numbers of a real model on a real sentence, beside the small numbers of a scene.

const real = numbers.real;
const word = real.words[real.at];

// What a scene shows of the model; other scenes show nothing.
const BESIDE = {
  qkv: () => [element("div", { classes: "strips" }, ["q", "k", "v"].map((name) => element("p", { classes: "few", text: `${name} = [${real[name].map(written).join(", ")}, …]` })))],
  scores: () => [bars(real.weights.map((value, i) => ({
    name: real.words[i], value, text: `${written(real.scores[i])} → ${written(value)}`, lit: value === Math.max(...real.weights),
  })), 1)],
  heads: () => [
    element("div", { classes: "maps" }, real.maps.map((weights, head) => {
      const name = t("lesson.real.map", { layer: real.layer, head });
      return element("figure", { classes: "map" }, [heat(weights, name), element("figcaption", { text: name })]);
    })),
    paragraph(t("lesson.real.pairs")),
    element("div", { classes: "maps", data: "pairs" }, real.pairs.map(pictureOfPair)),
    paragraph(t("lesson.real.meaning")),
  ],
  masks: () => [live(t("lesson.real.hidden", {
    hidden: sum(real.maps[real.head].map((row, i) => row.slice(i + 1).filter((x) => x === 0).length)),
    all: (real.words.length * (real.words.length - 1)) / 2,
  }), "real-masks")],
  cache: () => [live(t("lesson.real.bytes", {
    heads: real.heads, kv: real.kv_heads, layers: real.layers, count: counted(2 * real.kv_heads * real.size),
    bytes: bytesWritten(2 * real.kv_heads * real.size * real.layers * 2), whole: bytesWritten(2 * real.heads * real.size * real.layers * 2),
  }), "real-cache")],
  layers: () => [bars(real.norms.map((value, i) => ({ name: t("lesson.real.layer", { layer: i }), value, text: value.toFixed(0), lit: i === real.layer })))],
};

// The map of the head that has most of a pair's weight beyond what is expected, the pair framed.
function pictureOfPair({ layer, head, query, key, weight, expected, stands_out, map }) {
  const name = t("lesson.real.pair", { query: real.words[query], key: real.words[key], layer, head });
  const said = t(stands_out ? "lesson.real.stands" : "lesson.real.usual", { weight: written(weight), expected: written(expected) });
  return element("figure", { classes: "map large" }, [
    heat(map, name, { words: real.words, mark: [query, key] }), element("figcaption", { text: `${name}. ${said}` }),
  ]);
}

function beside(name) {
  if (!(name in BESIDE)) return [];
  return [element("div", { classes: "real", data: `real-of-${name}` }, [
    element("h3", { text: t("lesson.real.title") }),
    paragraph(t(`lesson.real.${name}`, { sentence: real.sentence, word, layer: real.layer, head: real.head, size: real.size })),
    ...BESIDE[name](),
  ])];
}

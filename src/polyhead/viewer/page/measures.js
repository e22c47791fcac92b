// What heads are sorted by: the pair's weight, then the statistics, in the order of polyhead's table of them.

let measures = [];

function makeMeasures() {
  const names = look.statisticNames ?? Object.keys(page.units);
  measures = [
    {
      unit: "share",
      get name() { return look.length ? `${apart(label(state.query))} → ${apart(label(state.key))}` : t("stat.pair"); },
      get help() { return t("stat.pair.help"); },
      at: ({ index }) => {
        const value = look.pair(state.query, state.key)?.[index];
        return value === undefined || Number.isNaN(value) ? null : value;
      },
    },
    ...names.map((name) => ({
      key: name,
      unit: page.units[name] ?? "",
      get name() { return told(`stat.${name}`, name); },
      get help() { return told(`stat.${name}.help`, name) + (this.unit ? ` (${told(`unit.${this.unit}`, this.unit)})` : ""); },
      at: ({ layer, head }) => look.statistics[layer]?.[name]?.[head] ?? null,
    })),
  ];
}

// "0-3,7" as a set of layers' numbers; null for all.
function chosenLayers() {
  const text = state.layers.trim();
  if (!text) return null;
  const found = new Set();
  for (const part of text.split(",")) {
    const [first, last = first] = part.split("-").map(Number);
    for (let layer = first; layer <= last && layer <= first + 1000; layer++) found.add(layer);
  }
  return found;
}

// The heads that the filters leave, with their values.
function shownHeads(measure = state.measure) {
  const layers = chosenLayers();
  const least = state.least === "" ? -Infinity : Number(state.least);
  return look.heads
    .map((head) => ({ ...head, value: measures[measure].at(head) }))
    .filter(({ layer, value }) => (!layers || layers.has(layer)) && (least === -Infinity || (value ?? -Infinity) >= least));
}

// Heads from best to worst; heads without a number come last, equals stay in layer order.
function sorted(heads, descending) {
  const sign = descending ? -1 : 1;
  return heads.sort((a, b) => {
    if (a.value === null || b.value === null) return Number(a.value === null) - Number(b.value === null);
    return sign * (a.value - b.value);
  });
}

const ranked = () => sorted(shownHeads(), state.descending);

// The rank of a head among all, 1 for the largest.
function rankOf(measure, at) {
  const value = measures[measure].at(at);
  return 1 + look.heads.filter((head) => (measures[measure].at(head) ?? -Infinity) > value).length;
}

// Smallest and largest value, to draw bars; shares always run from 0 so that bars compare.
function extent(measure) {
  const values = look.heads.map(measures[measure].at).filter((value) => value !== null);
  return [Math.min(0, ...values), Math.max(1e-9, ...values)];
}

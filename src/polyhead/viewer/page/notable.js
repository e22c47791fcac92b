// What is worth seeing on this text: pairs whose weight is not predicted, and the habits of heads.

/** @param {number | null} value */
const hundredths = (value) => value === null ? "–" : value.toFixed(2);

/** @param {string} kind @param {number} distance */
const placeOf = (kind, distance) =>
  t(`habit.${kind === "distance" && distance < 0 ? "ahead" : kind}`, { distance: Math.abs(distance) });

/** @param {string} text @param {string} data @param {() => void} go */
function notableButton(text, data, go) {
  const button = element("button", { type: "button", text, data });
  button.addEventListener("click", go);
  return button;
}

/** @param {number} layer @param {number} head */
const headButton = (layer, head) =>
  notableButton(headName(layer, head), `notable-${headName(layer, head)}`, () => openHead(layer, head));

// "1.8 didn → t 0.78": opens the head with the pair chosen.
/** @param {NotablePair} pair */
function pairItem({ head: [layer, head], query, key, weight }) {
  const words = { head: headName(layer, head), query: look.labels[query], key: look.labels[key] };
  const open = () => {
    set({ query, key });
    openHead(layer, head);
  };
  return element("li", {}, [
    notableButton(t("notable.pair", words), `notable-pair-${headName(layer, head)}`, open), ` ${hundredths(weight)}`,
  ]);
}

// "8 of 270 heads attend mostly to the previous token: 16.0 · 1.2 · 11.1", the commonest habit first.
/** @param {Habit[][]} rows */
function habitParts(rows) {
  const all = rows.flat().length;
  /** @type {Map<string, { layer: number, head: number, share: number }[]>} */
  const kinds = new Map();
  rows.forEach((row, layer) => row.forEach(([kind, , share, , , distance], head) => {
    if (kind === null) return;
    const place = placeOf(kind, distance);
    kinds.set(place, [...kinds.get(place) ?? [], { layer, head, share: share ?? 0 }]);
  }));
  return [...kinds].sort(([, a], [, b]) => b.length - a.length).map(([place, heads]) => {
    const [before, after] = t("notable.habit", { count: heads.length, all, place, heads: "\n" }).split("\n");
    const best = heads.sort((a, b) => b.share - a.share).slice(0, 3);
    return [before, ...best.flatMap(({ layer, head }, i) => [...(i ? [" · "] : []), headButton(layer, head)]), after];
  });
}

function drawNotable() {
  const found = look?.notable;
  $("#notable").hidden = !found;
  if (!found) return;
  const { alignment = [], pairs = [], more = true, habits = [] } = found;
  $("#notable-pairs").replaceChildren(...pairs.map(pairItem));
  $("#notable-note").hidden = !pairs.length;
  $("#notable-note").textContent = t(more ? "notable.pairs" : "notable.pairs_none");
  const parts = habitParts(habits);
  if (alignment.length) {
    const [before, after] = t("notable.alignment", { heads: "\n" }).split("\n");
    parts.unshift([before, ...alignment.flatMap(([layer, head], i) => [...(i ? [" · "] : []), headButton(layer, head)]), after]);
  }
  if (!parts.length && !pairs.length) parts.push([t("notable.none")]);
  const joined = parts.flatMap((part, i) => [...(i ? [t("notable.join")] : []), ...part]);
  $("#notable-text").replaceChildren(...joined, ...(joined.length ? [t("notable.end")] : []));
  drawHabit();
}

// Sentences on the open head: its habit, and what is known of the chosen pair.
function drawHabit() {
  const habit = look?.notable?.habits?.[state.layer]?.[state.head];
  const pair = look?.notable?.pairs?.find(({ head, query, key }) =>
    head[0] === state.layer && head[1] === state.head && query === state.query && key === state.key);
  const said = [];
  if (habit && habit[2] !== null && habit[3]) {
    const [kind, nearest, share, even, shuffled, distance] = habit;
    const frame = kind === null ? "habit.says_none" : kind === "even" ? "habit.says_even" : "habit.says";
    said.push(t(frame, { share: hundredths(share), even: hundredths(even), shuffled: hundredths(shuffled), place: placeOf(nearest, distance) }));
  }
  if (pair) {
    said.push(t("pair.says", {
      head: headName(state.layer, state.head), query: `“${look.labels[pair.query]}”`, key: `“${look.labels[pair.key]}”`,
      weight: hundredths(pair.weight), times: pair.times.toFixed(0), near: hundredths(pair.near),
      shuffled: hundredths(pair.shuffled), others: hundredths(pair.others),
    }));
  }
  $("#habit").textContent = said.join(" ");
  $("#habit").hidden = !said.length;
}

on(["look", "layer", "head", "query", "key"], drawHabit);

// Opens what stands out most where the reader has opened nothing yet.
function openNotable() {
  const best = look.notable?.pairs?.[0];
  if (!best || state.open || headInAddress() || !isWide()) return;
  set({ query: best.query, key: best.key });
  openHead(best.head[0], best.head[1], { replace: true });
}

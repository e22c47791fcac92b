// The next token: probabilities at the chosen temperature and top-k, as the model is and without some
// heads. p = exp(logit / t − Z(t)) over the vocabulary, and shares of the k likeliest with a top-k:
// exact, because Z was computed for each temperature that the slider has.

const NEXT_SHOWN = 12;

/** @type {{ temperature: number, topK: number, without: NextToken | null, drawn: string[] }} */
const next = { temperature: 9, topK: 0, without: null, drawn: [] };

// Probabilities of the listed tokens; tokens outside the top-k have none.
/** @param {NextToken} given */
function probabilities({ tokens, partitions }) {
  const heat = look.temperatures[next.temperature];
  if (!next.topK) return tokens.map(([, logit]) => Math.exp(logit / heat - partitions[next.temperature]));
  const most = tokens[0][1] / heat;
  const powers = tokens.map(([, logit], i) => (i < next.topK ? Math.exp(logit / heat - most) : 0));
  const total = powers.reduce((sum, x) => sum + x, 0);
  return powers.map((x) => x / total);
}

function drawNext() {
  const given = look.next;
  $("#next-view").hidden = !given;
  if (!given) return;
  const heat = look.temperatures[next.temperature];
  $("#temperature").value = String(next.temperature);
  $("#temperature").setAttribute("aria-valuetext", heat.toFixed(1));
  $("#temperature-said").textContent = heat.toFixed(1);
  $("#top-k").value = String(next.topK);
  $("#top-k").setAttribute("aria-valuetext", next.topK ? String(next.topK) : t("top_k_all"));
  $("#top-k-said").textContent = next.topK ? String(next.topK) : t("top_k_all");
  const shares = probabilities(given);
  const { without } = next;
  const after = without && new Map(without.tokens.map(([token], i) => [token, probabilities(without)[i]]));
  /** @type {[string, number | null][]} */
  const listed = given.tokens.slice(0, NEXT_SHOWN).map(([token], i) => [token, shares[i]]);
  const fresh = without
    ? without.tokens.slice(0, NEXT_SHOWN / 2).map(([token]) => token).filter((token) => !listed.some(([name]) => name === token)) : [];
  const all = new Map(given.tokens.map(([token], i) => [token, shares[i]]));
  for (const token of fresh) listed.push([token, all.get(token) ?? null]);
  const bar = (share, data) =>
    withBar(element("td", { classes: "sorted", text: share === null ? "" : share.toFixed(4), data }), share ?? 0);
  $("#next").replaceChildren(...listed.map(([token, share], i) => element("tr", {}, [
    element("th", { scope: "row" }, [element("bdi", { text: token })]),
    bar(share, `next-${i}`),
    ...(after ? [bar(after.get(token) ?? null, `next-without-${i}`)] : []),
  ])));
  $("#next-without").hidden = !after;
  const listedShare = shares.reduce((sum, x) => sum + x, 0);
  $("#next-rest").textContent = next.topK ? "" : t("next_rest", { count: given.tokens.length, share: Math.max(0, 1 - listedShare).toFixed(4) });
  $("#drawn").textContent = next.drawn.length ? t("drawn", { list: next.drawn.join(" ") }) : "";
}

// Draws a token as generation would; the tokens that are not listed count as one.
function drawToken() {
  const from = next.without ?? look.next;
  if (!from) return;
  const shares = probabilities(from);
  let left = Math.random();
  const found = shares.findIndex((share) => (left -= share) < 0);
  next.drawn.push(found < 0 ? t("drawn_other") : from.tokens[found][0]);
  if (next.drawn.length > 12) next.drawn.shift();
  drawNext();
}

function startNext() {
  $("#temperature").addEventListener("input", (event) => {
    next.temperature = Number(event.target.value);
    drawNext();
  });
  $("#top-k").addEventListener("input", (event) => {
    next.topK = Number(event.target.value);
    drawNext();
  });
  $("#draw-token").addEventListener("click", drawToken);
}

on(["look"], () => {
  Object.assign(next, { without: null, drawn: [] });
  if (!look.next) return drawNext();
  $("#temperature").max = String(look.temperatures.length - 1);
  $("#top-k").max = String(look.next.tokens.length);
  next.temperature = Math.max(0, look.temperatures.indexOf(1));
  next.topK = 0;
  drawNext();
});

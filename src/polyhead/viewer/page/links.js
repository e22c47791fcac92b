// Lines between the tokens for the open head and for those that are kept beside it.

const kept = []; // [layer, head] of heads whose lines stay

const isKept = (layer, head) => kept.some((other) => other[0] === layer && other[1] === head);

// At most LINE_TOKENS of a run of tokens, the last of them around `token`.
function lineRun([start, stop], token) {
  const first = stop - start > LINE_TOKENS
    ? Math.max(start, Math.min(token - LINE_TOKENS + 1, stop - LINE_TOKENS)) : start;
  return { first, labels: look.labels.slice(first, Math.min(stop, first + LINE_TOKENS)) };
}

function drawLinks() {
  const { layer, head, query } = state;
  if (!state.open || !look.has(layer, head) || !look.length) return;
  const about = look.layers[layer];
  const queries = lineRun(about.queries, query);
  const same = about.queries[0] === about.keys[0];
  const keys = same ? queries : lineRun(about.keys, state.key);
  const alike = ([l]) => String(look.layers[l].queries) === String(about.queries) && String(look.layers[l].keys) === String(about.keys);
  const heads = (isKept(layer, head) ? kept : [...kept, [layer, head]]).filter(alike);
  const [q0, k0] = [queries.first - about.queries[0], keys.first - about.keys[0]];
  const ends = { q0, q1: q0 + queries.labels.length, k0, k1: k0 + keys.labels.length };
  const active = (state.token >= 0 ? state.token : -1) - queries.first;
  drawLinesIn($("#lines"), {
    queries, keys, active: active < queries.labels.length ? active : -1,
    heads: heads.map(([l, h]) => {
      const part = look.part(l, h, ends, LINE_TOKENS);
      return (row, column) => part?.values[row * part.columns + column] ?? 0;
    }),
  });
  $("#lines").setAttribute("aria-label", `${t("lines")}: ${heads.map(([l, h]) => headName(l, h)).join(", ")}`);
  $("#lines-note").textContent = linesNote(queries, keys);
  $("#keep").textContent = isKept(layer, head) ? t("drop_lines") : t("keep_lines");
  $("#lines-heads").replaceChildren(...heads.map(([l, h], number) => {
    const button = element("button", {
      type: "button", classes: `quiet of-${number % 6}`, text: headName(l, h), data: `lines-${headName(l, h)}`,
      "aria-pressed": String(l === layer && h === head),
    });
    button.addEventListener("click", () => openHead(l, h));
    return button;
  }));
}

function keepLines() {
  const { layer, head } = state;
  const at = kept.findIndex((other) => other[0] === layer && other[1] === head);
  if (at >= 0) kept.splice(at, 1);
  else kept.push([layer, head]);
  drawLinks();
}

$("#keep").addEventListener("click", keepLines);
on(["look"], () => { kept.length = 0; });
on(["layer", "head", "open", "query", "key", "token", "parts", "look"], drawLinks);

// Lines between the tokens for the open head and for those that are kept beside it.

const kept = []; // [layer, head] of heads whose lines stay

const isKept = (layer, head) => kept.some((other) => other[0] === layer && other[1] === head);

function drawLooks() {
  if (!state.open || state.layer < 0 || !isRead() || !TOKENS) return;
  const { layer, head, query } = state;
  const first = TOKENS > LINE_TOKENS ? Math.max(0, Math.min(query - LINE_TOKENS + 1, TOKENS - LINE_TOKENS)) : 0;
  const shown = { first, labels: page.labels.slice(first, first + LINE_TOKENS) };
  const heads = isKept(layer, head) ? kept : [...kept, [layer, head]];
  const active = (state.token >= 0 ? state.token : -1) - first;
  drawLinesIn($("#lines"), {
    queries: shown, keys: shown, active: active < shown.labels.length ? active : -1,
    heads: heads.map(([l, h]) => (row, column) => weight(l, h, first + row, first + column)),
  });
  $("#lines").setAttribute("aria-label", `${t("lines")}: ${heads.map(([l, h]) => headName(l, h)).join(", ")}`);
  $("#lines-note").textContent = linesNote(shown, shown);
  $("#keep").textContent = t(isKept(layer, head) ? "drop_lines" : "keep_lines");
  $("#lines-heads").replaceChildren(...heads.map(([l, h], number) => element("button", {
    type: "button", classes: `quiet of-${number % 6}`, text: headName(l, h), data: `lines-${headName(l, h)}`,
    "aria-pressed": String(l === layer && h === head),
  })));
  [...$("#lines-heads").children].forEach((button, number) =>
    button.addEventListener("click", () => openHead(...heads[number])));
}

function keepLines() {
  const { layer, head } = state;
  const place = kept.findIndex((other) => other[0] === layer && other[1] === head);
  if (place >= 0) kept.splice(place, 1);
  else kept.push([layer, head]);
  drawLooks();
}

$("#keep").addEventListener("click", keepLines);
on(["layer", "head", "open", "query", "token", "layersRead"], drawLooks);

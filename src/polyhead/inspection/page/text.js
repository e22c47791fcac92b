// The running text: each token tinted by how much the active token looks at it, underlined by how
// much it looks at the active token. The active token is the hovered or focused one, else the query.

const strip = { box: $("#tokens"), chips: [], cursor: 0 };

function makeStrip() {
  const children = [];
  tokens.forEach((text, index) => {
    const chip = element("span", {
      classes: "token", role: "option", tabindex: index === 0 ? "0" : "-1", data: `token-${index}`,
    }, [element("bdi", { text: label(index) }), element("i", { "aria-hidden": "true" })]);
    chip.dataset.index = index;
    chip.classList.toggle("spaced", index === 0 || text.startsWith(" "));
    chip.classList.toggle("joined", /^.[₂₃₄]/u.test(text)); // a later part of one character
    strip.chips.push(chip);
    children.push(chip);
    if (text.includes("\n")) children.push(element("span", { classes: "break", role: "presentation" }));
  });
  strip.box.replaceChildren(...children);
}

function drawStrip() {
  const ready = state.open && state.layer >= 0 && packed[state.layer];
  const active = state.token >= 0 ? state.token : state.query;
  const out = state.lanes !== "in";
  const into = state.lanes !== "out";
  for (const [index, chip] of strip.chips.entries()) {
    const given = ready && out ? colourShare(state.layer, state.head, active, index) : -1;
    const taken = ready && into ? weight(state.layer, state.head, index, active) : -1;
    const colour = given < 0 ? null : shades()[step(given)];
    chip.style.backgroundColor = colour && step(given) > 0 ? colour.css : "";
    chip.style.color = colour && step(given) > 0 ? colour.ink : "";
    chip.lastElementChild.style.backgroundColor =
      taken > 0 && step(taken) > 0 ? shadesIn()[step(taken)].css : "";
    chip.classList.toggle("active", index === state.token);
    chip.classList.toggle("is-query", index === state.query);
    chip.classList.toggle("is-key", index === state.key);
    chip.setAttribute("aria-selected", String(index === state.query));
    chip.setAttribute("aria-label", t("token_of", { token: visible(index), index }) +
      (index === state.query ? t("is_query") : "") + (index === state.key ? t("is_key") : ""));
  }
  drawSentences(ready ? active : -1);
}

// "it looks at: animal 0.41 · The 0.20 · …" and the same the other way round.
function drawSentences(active) {
  const write = (target, words, weightOf) => {
    const line = $(target);
    if (active < 0) return line.replaceChildren();
    const most = tokens.map((_, index) => ({ index, value: weightOf(index) }))
      .filter(({ value }) => value > 0)
      .sort((a, b) => b.value - a.value)
      .slice(0, 4);
    line.replaceChildren(
      element("b", { text: label(active), dir: "auto" }), ` ${words} `,
      ...(most.length ? most.flatMap(({ index, value }, i) => [
        i ? " · " : "", element("b", { text: label(index), dir: "auto" }), ` ${short(value)}`,
      ]) : [t("nothing")]),
    );
  };
  write("#sentence-out", t("looks_at"), (i) => weight(state.layer, state.head, active, i));
  write("#sentence-in", t("looked_at"), (i) => weight(state.layer, state.head, i, active));
  $("#sentence-out").hidden = state.lanes === "in";
  $("#sentence-in").hidden = state.lanes === "out";
}

function chipOf(event) {
  const chip = event.target.closest?.(".token");
  return chip ? Number(chip.dataset.index) : -1;
}

function moveChip(index) {
  strip.chips[strip.cursor].setAttribute("tabindex", "-1");
  strip.cursor = Math.min(TOKENS - 1, Math.max(0, index));
  strip.chips[strip.cursor].setAttribute("tabindex", "0");
  strip.chips[strip.cursor].focus();
}

// The chip on the line above or below that lies nearest.
function chipBeside(index, down) {
  const from = strip.chips[index].getBoundingClientRect();
  let best = index;
  let bestCost = Infinity;
  strip.chips.forEach((chip, i) => {
    const to = chip.getBoundingClientRect();
    const gap = down ? to.top - from.bottom : from.top - to.bottom;
    const cost = gap * 1e4 + Math.abs(to.left - from.left);
    if (gap >= -1 && cost < bestCost) [best, bestCost] = [i, cost];
  });
  return best;
}

function onStripKey(event) {
  const index = chipOf(event);
  if (index < 0 || event.altKey || event.metaKey || event.ctrlKey) return;
  const goals = {
    ArrowRight: () => index + 1, ArrowLeft: () => index - 1, Home: () => 0, End: () => TOKENS - 1,
    ArrowUp: () => chipBeside(index, false), ArrowDown: () => chipBeside(index, true),
  };
  if (event.key in goals) {
    event.preventDefault();
    moveChip(goals[event.key]());
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    set(event.shiftKey ? { key: index } : { query: index });
  }
}

function startText() {
  makeStrip();
  const { box } = strip;
  box.addEventListener("pointerover", (event) => {
    if (event.pointerType !== "touch") set({ token: chipOf(event) });
  });
  box.addEventListener("pointerleave", () => {
    set({ token: box.contains(document.activeElement) ? strip.cursor : -1 });
  });
  box.addEventListener("focusin", (event) => set({ token: chipOf(event) }));
  box.addEventListener("focusout", () => set({ token: -1 }));
  box.addEventListener("click", (event) => {
    const index = chipOf(event);
    if (index < 0) return;
    moveChip(index);
    set(event.shiftKey ? { key: index } : { query: index });
  });
  box.addEventListener("keydown", onStripKey);
  for (const [id, name] of [["#pair-query", "query"], ["#pair-key", "key"]]) {
    const select = $(id);
    select.append(...tokens.map((_, index) =>
      element("option", { text: `${label(index)}  ${index}`, value: String(index) })));
    select.disabled = !TOKENS;
    select.addEventListener("change", () => set({ [name]: Number(select.value) }));
  }
  drawPair();
}

function drawPair() {
  $("#pair-query").value = String(state.query);
  $("#pair-key").value = String(state.key);
}

on(["layer", "head", "open", "query", "key", "token", "lanes", "scale", "hideFirst", "dark",
  "layersRead"], drawStrip);
on(["query", "key"], drawPair);
on(["open", "query"], () => {
  if (!state.open || !TOKENS) return;
  requestAnimationFrame(() => reveal(strip.box, strip.chips[state.query]));
});

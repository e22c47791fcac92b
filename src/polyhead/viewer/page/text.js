// The running text: each token tinted by how much the active token looks at it, underlined by how
// much it looks at the active token. The active token is the hovered or focused one, else the query.

const MOST_CHIPS = 256; // of a longer text the part around the query is shown

const strip = { box: $("#tokens"), chips: new Map(), cursor: 0, first: 0, of: -1 };

function makeStrip() {
  const first = look.length <= MOST_CHIPS ? 0
    : Math.max(0, Math.min(look.length - MOST_CHIPS, state.query - MOST_CHIPS / 2));
  const inside = state.query >= strip.first && state.query < strip.first + MOST_CHIPS;
  if (strip.of === state.look && (inside || look.length <= MOST_CHIPS)) return;
  Object.assign(strip, { first, of: state.look, chips: new Map() });
  const children = [];
  for (let index = first; index < Math.min(look.length, first + MOST_CHIPS); index++) {
    const text = look.tokens[index];
    const chip = element("span", {
      classes: "token", role: "option", tabindex: index === first ? "0" : "-1", data: `token-${index}`,
    }, [element("bdi", { text: label(index) }), element("i", { "aria-hidden": "true" })]);
    chip.dataset.index = String(index);
    chip.classList.toggle("spaced", index === 0 || text.startsWith(" "));
    chip.classList.toggle("joined", /^.[₂₃₄]/u.test(text)); // a later part of one character
    strip.chips.set(index, chip);
    if (index === look.own && index > first) children.push(element("span", { classes: "break written", role: "presentation" }));
    children.push(chip);
    if (text.includes("\n")) children.push(element("span", { classes: "break", role: "presentation" }));
  }
  strip.cursor = first;
  strip.box.replaceChildren(...children);
}

function drawStrip() {
  const { layer, head } = state;
  const ready = state.open && look.has(layer, head);
  const active = state.token >= 0 ? state.token : state.query;
  const row = ready ? look.row(layer, head, active) : null;
  const column = ready ? look.column(layer, head, active) : null;
  const given = state.lanes === "in" ? null : colourRow(row);
  const taken = state.lanes === "out" ? null : column;
  const { queries: [q0], keys: [k0] } = look.layers[Math.max(0, layer)];
  for (const [index, chip] of strip.chips) {
    const out = given?.[index - k0] ?? -1;
    const into = taken?.[index - q0] ?? -1;
    const colour = out > 0 && step(out) > 0 ? shades()[step(out)] : null;
    chip.style.backgroundColor = colour ? colour.css : "";
    chip.style.color = colour ? colour.ink : "";
    chip.lastElementChild.style.backgroundColor = into > 0 && step(into) > 0 ? shadesIn()[step(into)].css : "";
    chip.classList.toggle("active", index === state.token);
    chip.classList.toggle("is-query", index === state.query);
    chip.classList.toggle("is-key", index === state.key);
    chip.setAttribute("aria-selected", String(index === state.query));
    chip.setAttribute("aria-label", t("token_of", { token: visible(index), index }) +
      (index === state.query ? t("is_query") : "") + (index === state.key ? t("is_key") : ""));
  }
  const written = (target, values, first, words) => {
    const line = $(target);
    if (!values || active < 0) return line.replaceChildren();
    const most = [...values].map((value, i) => ({ index: first + i, value }))
      .filter(({ value }) => value > 0).sort((a, b) => b.value - a.value).slice(0, 4);
    line.replaceChildren(
      element("b", { text: label(active), dir: "auto" }), words,
      ...(most.length ? most.flatMap(({ index, value }, i) => [
        i ? " · " : "", element("b", { text: label(index), dir: "auto" }), ` ${short(value)}`,
      ]) : [t("nothing")]),
    );
  };
  written("#sentence-out", row, k0, ` ${t("looks_at")} `);
  written("#sentence-in", column, q0, ` ${t("looked_at")} `);
  $("#sentence-out").hidden = state.lanes === "in";
  $("#sentence-in").hidden = state.lanes === "out";
}

function chipOf(event) {
  const chip = event.target.closest?.(".token");
  return chip ? Number(chip.dataset.index) : -1;
}

function moveChip(index) {
  strip.chips.get(strip.cursor)?.setAttribute("tabindex", "-1");
  strip.cursor = Math.min(strip.first + strip.chips.size - 1, Math.max(strip.first, index));
  const chip = strip.chips.get(strip.cursor);
  chip.setAttribute("tabindex", "0");
  chip.focus();
}

// The chip on the line above or below that lies nearest.
function chipBeside(index, down) {
  const from = strip.chips.get(index).getBoundingClientRect();
  let best = index;
  let bestCost = Infinity;
  for (const [i, chip] of strip.chips) {
    const to = chip.getBoundingClientRect();
    const gap = down ? to.top - from.bottom : from.top - to.bottom;
    const cost = gap * 1e4 + Math.abs(to.left - from.left);
    if (gap >= -1 && cost < bestCost) [best, bestCost] = [i, cost];
  }
  return best;
}

function onStripKey(event) {
  const index = chipOf(event);
  if (index < 0 || event.altKey || event.metaKey || event.ctrlKey) return;
  const goals = {
    ArrowRight: () => index + 1, ArrowLeft: () => index - 1, Home: () => 0, End: () => look.length - 1,
    ArrowUp: () => chipBeside(index, false), ArrowDown: () => chipBeside(index, true),
  };
  if (event.key in goals) {
    event.preventDefault();
    moveChip(goals[event.key]());
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    choose(index, event.shiftKey);
  }
}

// Makes a token the query of the pair, or its key, where the layer has it as one.
function choose(index, asKey) {
  const { layer } = state;
  if (asKey) {
    if (layer < 0 || look.isKey(layer, index)) set({ key: index });
  } else if (layer < 0 || look.isQuery(layer, index)) {
    set({ query: index });
  }
}

function startText() {
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
    choose(index, event.shiftKey);
  });
  box.addEventListener("keydown", onStripKey);
  for (const [id, name] of [["#pair-query", "query"], ["#pair-key", "key"]]) {
    const select = $(id);
    select.addEventListener("change", () => set({ [name]: Number(select.value) }));
  }
}

// The selects hold the tokens that the open layer has as queries and keys.
const listed = ["", ""];

function drawPair() {
  const about = look.layers[Math.max(0, state.layer)];
  /** @type {[string, Run, number][]} */
  const sides = [["#pair-query", about.queries, state.query], ["#pair-key", about.keys, state.key]];
  sides.forEach(([id, run, value], side) => {
    const select = $(id);
    const of = [state.look, ...run].join();
    if (of !== listed[side]) {
      listed[side] = of;
      select.replaceChildren(...Array.from({ length: run[1] - run[0] }, (_, i) =>
        element("option", { text: `${label(run[0] + i)}  ${run[0] + i}`, value: String(run[0] + i) })));
    }
    select.disabled = !look.length;
    select.value = String(value);
  });
}

on(["look", "query"], makeStrip);
on(["layer", "head", "open", "query", "key", "token", "lanes", "scale", "hideFirst", "dark", "rows", "parts", "look"], drawStrip);
on(["query", "key", "layer", "look"], drawPair);
on(["open", "query"], () => {
  if (!state.open || !look.length) return;
  requestAnimationFrame(() => {
    const chip = strip.chips.get(state.query);
    if (chip) reveal(strip.box, chip);
  });
});

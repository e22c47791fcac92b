// All heads as small maps: rows of heads by layer or by rank. How they are drawn is in thumbs.js.

const maps = { box: $("#maps"), cells: new Map(), stale: new Set(), size: 0, cursor: "", described: "" };

const MIN_MAP = 22; // smallest side of a map, in CSS pixels

function makeCells() {
  maps.described = "";
  maps.cells.clear();
  maps.stale.clear();
  for (const { layer, head } of look.heads) {
    const name = headName(layer, head);
    const cell = element("div", {
      classes: "head", role: "gridcell", tabindex: "-1", "aria-selected": "false", data: `head-${name}`,
    }, [
      element("span", { classes: "head-name", "aria-hidden": "true" }),
    ]);
    Object.assign(cell.dataset, { layer, head });
    maps.cells.set(name, cell);
    maps.stale.add(cell);
  }
}

const place = (cell) => ({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) });

// Rows of maps. By layer, heads that share a kv head stand together under one line.
function arrangeMaps() {
  const focused = focusedIn(maps.box);
  const rows = [];
  const row = (name, spoken, groups, shared) => rows.push(element("div", { classes: "layer", role: "row" }, [
    element("span", { classes: "layer-name", role: "rowheader", text: name, "aria-label": spoken }),
    element("div", { classes: "cells", role: "presentation" }, [element("canvas", { "aria-hidden": "true" }), ...groups.map((group, index) => element("div", {
      classes: shared ? "group shared" : "group", role: "presentation",
      ...(shared && { title: t("group", { layer: spoken, kv: index }) }),
    }, group))]),
  ]));
  const cellOf = ({ layer, head }) => maps.cells.get(headName(layer, head));
  if (state.order === "rank") {
    const order = ranked();
    for (let start = 0; start < order.length; start += look.most) {
      const cells = order.slice(start, start + look.most).map(cellOf);
      row(`#${start + 1}`, t("ranks_from", { rank: start + 1 }), [cells], false);
    }
  } else {
    const shown = Map.groupBy(shownHeads(), ({ layer }) => layer);
    for (const [layer, heads] of shown) {
      const shared = look.sharesKeys(layer);
      const groups = shared ? [...Map.groupBy(heads, ({ head }) => look.kvHead(layer, head)).values()] : [heads];
      row(look.layerShort(layer), look.layerName(layer), groups.map((group) => group.map(cellOf)), shared);
    }
  }
  maps.box.classList.toggle("ranked", state.order === "rank");
  maps.box.replaceChildren(...rows);
  watchRows(rows);
  const left = maps.box.querySelectorAll(".head").length;
  $("#shown").textContent = left === look.heads.length ? t("heads", { all: left })
    : t("heads_left", { some: left, all: look.heads.length });
  if (focused?.isConnected) focused.focus({ preventScroll: true });
  if (!maps.cells.get(maps.cursor)?.isConnected) {
    const first = maps.box.querySelector(".head");
    if (first) moveCursor(first, false);
  }
}

// The bar under each map, its name and value, and what a screen reader says.
function describeMaps() {
  const values = state.measure ? [state.measured] : [state.query, state.key, state.pairs];
  const described = [state.look, language, state.order, state.measure, state.descending, ...values].join();
  if (described === maps.described) return;
  maps.described = described;
  const measure = measures[state.measure];
  const [low, high] = extent(state.measure);
  const ranks = sorted(look.heads.map((head) => ({ ...head, value: measure.at(head) })), state.descending);
  const rankOf = new Map(ranks.map(({ index }, rank) => [index, rank + 1]));
  for (const head of look.heads) {
    const name = headName(head.layer, head.head);
    const cell = maps.cells.get(name);
    const value = measure.at(head);
    const share = value === null ? 0 : (value - low) / (high - low);
    cell.style.setProperty("--share", `${(100 * share).toFixed(1)}%`);
    if (state.order === "rank") {
      cell.lastElementChild.replaceChildren(element("b", { text: name }), element("span", { text: short(value) }));
    }
    cell.setAttribute("aria-label", `${t("head", { name })}${spokenKv(head)}. ${measure.name}: ${short(value)}` +
      (value === null ? "" : t("rank", { rank: rankOf.get(head.index), heads: look.heads.length })));
  }
}

// The map of the open head.
function markMap() {
  for (const cell of maps.box.querySelectorAll('[aria-selected="true"]')) cell.setAttribute("aria-selected", "false");
  if (!state.open || !look.has(state.layer, state.head)) return;
  maps.cells.get(headName(state.layer, state.head)).setAttribute("aria-selected", "true");
}

// The map of the open head stays in view beside it: all maps move when they make room for the panel.
function revealMap() {
  const cell = state.open && look.has(state.layer, state.head) ? maps.cells.get(headName(state.layer, state.head)) : null;
  if (cell?.isConnected && isWide()) reveal($("#overview"), cell);
}

const spokenKv = ({ layer, head }) => (look.sharesKeys(layer) ? t("kv_head", { kv: look.kvHead(layer, head) }) : "");

// The largest maps for which a layer fills its lines evenly: one line if they stay legible, else
// two, three, ... lines of whole kv groups.
function sizeMaps() {
  const room = maps.box.clientWidth - 34;
  if (!look || room <= 0) return;
  const heads = look.most;
  const groups = Math.max(...look.layers.map(({ kvHeads }) => kvHeads));
  const alike = look.layers.every((layer) => layer.kvHeads === groups && layer.heads === heads);
  const units = alike ? groups : heads;
  const gap = groups < heads ? 10 : 3;
  let size = 0;
  let perLine = units;
  for (; perLine > 0; perLine--) {
    if (units % perLine) continue;
    const count = (perLine * heads) / units;
    size = Math.floor((room - 3 * (count - perLine) - gap * (perLine - 1)) / count);
    if (size >= MIN_MAP) break;
  }
  size = Math.max(MIN_MAP, Math.min(148, size));
  maps.box.classList.toggle("wrapped", perLine < units);
  if (size === maps.size) return;
  maps.size = size;
  maps.box.style.setProperty("--thumb", `${size}px`);
  redrawThumbs();
}

on(["look"], () => {
  maps.box.replaceChildren();
  sizeMaps(); // before there are cells: it asks for the room, which lays the page out
  makeCells();
  arrangeMaps();
});
on(["scale", "dark", "hideFirst"], redrawThumbs);
on(["order", "layers", "least"], () => {
  arrangeMaps();
  $("#overview").scrollTop = 0;
});
on(["measure", "descending", "query", "key", "pairs", "measured"], () => {
  if (state.order === "rank" || state.least !== "") arrangeMaps();
});
on(["measure", "descending", "query", "key", "pairs", "measured", "look", "order"], describeMaps);
on(["layer", "head", "open", "look"], markMap);
on(["layer", "head", "open", "look", "order"], () => requestAnimationFrame(revealMap));

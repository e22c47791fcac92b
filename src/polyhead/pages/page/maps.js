// All heads as small maps: rows of heads by layer or by rank, drawn when they come into view.

const maps = { box: $("#maps"), cells: new Map(), seen: new Set(), stale: new Set(), size: 0, cursor: "" };

const MIN_MAP = 22; // smallest side of a map, in CSS pixels

const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) {
      maps.seen.add(target);
      drawThumb(target);
    } else {
      maps.seen.delete(target);
    }
  }
}, { rootMargin: "200px" });

function makeCells() {
  watcher.disconnect();
  for (const set of [maps.cells, maps.seen, maps.stale]) set.clear();
  for (const { layer, head } of look.heads) {
    const name = headName(layer, head);
    const cell = element("div", {
      classes: "head", role: "gridcell", tabindex: "-1", "aria-selected": "false", data: `head-${name}`,
    }, [
      element("canvas", { "aria-hidden": "true" }),
      element("span", { classes: "bar", "aria-hidden": "true" }, [element("i")]),
      element("span", { classes: "head-name", "aria-hidden": "true" }),
    ]);
    Object.assign(cell.dataset, { layer, head });
    maps.cells.set(name, cell);
    maps.stale.add(cell);
    watcher.observe(cell);
  }
}

const place = (cell) => ({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) });

// Each pixel takes the largest shade of the cells that it covers, so thin lines survive shrinking.
function drawThumb(cell) {
  const { layer, head } = place(cell);
  if (!maps.stale.has(cell) || !maps.size || !look.length) return;
  const small = look.small(layer, head, state.hideFirst);
  if (!small) return;
  maps.stale.delete(cell);
  const { rows, columns } = small;
  const sides = look.sides(layer);
  const steps = shaded(small, {
    triangle: look.layers[layer].triangle, high: sides.rows / rows, wide: sides.columns / columns, first: Number(state.hideFirst),
  });
  const canvas = cell.firstElementChild;
  const size = Math.round(maps.size * (devicePixelRatio || 1));
  if (canvas.width !== size) canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  const colours = shades();
  const edges = (count) => Array.from({ length: size + 1 }, (_, i) => Math.floor((i * count) / size));
  const [down, across] = [edges(rows), edges(columns)];
  for (let y = 0; y < size; y++) {
    const lastRow = Math.max(down[y] + 1, down[y + 1]);
    for (let x = 0; x < size; x++) {
      const lastColumn = Math.max(across[x] + 1, across[x + 1]);
      let best = -1;
      for (let row = down[y]; row < lastRow; row++) {
        for (let column = across[x]; column < lastColumn; column++) {
          best = Math.max(best, steps[row * columns + column]);
        }
      }
      if (best >= 0) image.data.set([...colours[best].rgb, 255], 4 * (y * size + x));
    }
  }
  context.putImageData(image, 0, 0);
}

let repaint = 0;

function redrawThumbs() {
  for (const cell of maps.cells.values()) maps.stale.add(cell);
  cancelAnimationFrame(repaint);
  repaint = requestAnimationFrame(() => maps.seen.forEach(drawThumb));
}

// Rows of maps. By layer, heads that share a kv head stand together under one line.
function arrangeMaps() {
  const focused = maps.box.contains(document.activeElement) ? document.activeElement : null;
  const rows = [];
  const row = (name, spoken, groups, shared) => rows.push(element("div", { classes: "layer", role: "row" }, [
    element("span", { classes: "layer-name", role: "rowheader", text: name, "aria-label": spoken }),
    element("div", { classes: "cells", role: "presentation" }, groups.map((group, index) => element("div", {
      classes: shared ? "group shared" : "group", role: "presentation",
      ...(shared && { title: t("group", { layer: spoken, kv: index }) }),
    }, group))),
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
  const measure = measures[state.measure];
  const [low, high] = extent(state.measure);
  const ranks = sorted(look.heads.map((head) => ({ ...head, value: measure.at(head) })), state.descending);
  const rankOf = new Map(ranks.map(({ index }, rank) => [index, rank + 1]));
  for (const head of look.heads) {
    const name = headName(head.layer, head.head);
    const cell = maps.cells.get(name);
    const value = measure.at(head);
    const share = value === null ? 0 : (value - low) / (high - low);
    const [, bar, caption] = cell.children;
    bar.firstElementChild.style.width = `${100 * share}%`;
    caption.replaceChildren(element("b", { text: name }), element("span", { text: short(value) }));
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
  makeCells();
  arrangeMaps();
  sizeMaps();
});
on(["scale", "dark", "hideFirst"], redrawThumbs);
on(["order", "layers", "least"], () => {
  arrangeMaps();
  $("#overview").scrollTop = 0;
});
on(["measure", "descending", "query", "key", "pairs", "measured"], () => {
  if (state.order === "rank" || state.least !== "") arrangeMaps();
});
on(["measure", "descending", "query", "key", "pairs", "measured", "look"], describeMaps);
on(["layer", "head", "open", "look"], markMap);

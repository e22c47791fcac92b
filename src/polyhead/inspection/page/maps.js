// All heads as small maps: rows of heads by layer or by rank, drawn when they come into view.

const maps = {
  box: $("#maps"), cells: new Map(), seen: new Set(), stale: new Set(),
  steps: new Int16Array(TOKENS * TOKENS), size: 0, cursor: headName(0, 0),
};

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
  for (const { layer, head } of allHeads) {
    const name = headName(layer, head);
    const cell = element("div", {
      classes: "head", role: "gridcell", tabindex: "-1", data: `head-${name}`,
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
  if (!maps.stale.has(cell) || !packed[layer] || !maps.size || !TOKENS) return;
  maps.stale.delete(cell);
  const canvas = cell.firstElementChild;
  const size = Math.round(maps.size * (devicePixelRatio || 1));
  if (canvas.width !== size) canvas.width = canvas.height = size;
  const context = canvas.getContext("2d");
  const image = context.createImageData(size, size);
  const colours = shades();
  shade(layer, head, maps.steps);
  const edge = Array.from({ length: size + 1 }, (_, i) => Math.floor((i * TOKENS) / size));
  for (let y = 0; y < size; y++) {
    const lastQuery = Math.max(edge[y] + 1, edge[y + 1]);
    for (let x = 0; x < size; x++) {
      const lastKey = Math.max(edge[x] + 1, edge[x + 1]);
      let best = -1;
      for (let query = edge[y]; query < lastQuery; query++) {
        for (let key = edge[x]; key < lastKey; key++) {
          best = Math.max(best, maps.steps[query * TOKENS + key]);
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

// Rows of HEADS maps. By layer, heads that share a kv head stand together under one line.
function arrangeMaps() {
  const focused = maps.box.contains(document.activeElement) ? document.activeElement : null;
  const rows = [];
  const inRank = state.order === "rank";
  const order = inRank ? ranked() : allHeads;
  for (let start = 0; start < order.length; start += HEADS) {
    const cells = order.slice(start, start + HEADS)
      .map(({ layer, head }) => maps.cells.get(headName(layer, head)));
    const layer = start / HEADS;
    const groups = inRank ? [cells] : groupedByKv(layer, cells);
    rows.push(element("div", { classes: "layer", role: "row" }, [
      element("span", {
        classes: "layer-name", role: "rowheader", text: inRank ? `#${start + 1}` : layerShort(layer),
        "aria-label": inRank ? t("ranks_from", { rank: start + 1 }) : layerName(layer),
      }),
      element("div", { classes: "cells", role: "presentation" }, groups.map((group, index) => {
        const shared = !inRank && page.kvHeads[layer] < HEADS;
        return element("div", {
          classes: shared ? "group shared" : "group", role: "presentation",
          ...(shared && { title: t("group", { layer: layerName(layer), kv: index }) }),
        }, group);
      })),
    ]));
  }
  maps.box.classList.toggle("ranked", inRank);
  maps.box.replaceChildren(...rows);
  focused?.focus({ preventScroll: true });
}

function groupedByKv(layer, cells) {
  const width = HEADS / page.kvHeads[layer];
  if (width === 1) return [cells];
  return Array.from({ length: page.kvHeads[layer] }, (_, g) =>
    cells.slice(g * width, (g + 1) * width));
}

// The bar under each map, its name and value, and what a screen reader says.
function describeMaps() {
  const measure = measures[state.measure];
  const [low, high] = extent(state.measure);
  const ranks = isRead() ? ranked().map(({ layer, head }) => headName(layer, head)) : [];
  const rankOf = new Map(ranks.map((name, index) => [name, index + 1]));
  for (const [name, cell] of maps.cells) {
    const at = place(cell);
    const value = measure.at(at);
    const share = value === null ? 0 : (value - low) / (high - low);
    const [, bar, caption] = cell.children;
    bar.firstElementChild.style.width = `${100 * share}%`;
    caption.replaceChildren(element("b", { text: name }), element("span", { text: short(value) }));
    const chosen = state.layer === at.layer && state.head === at.head;
    cell.setAttribute("aria-selected", String(chosen && state.open));
    const kv = page.kvHeads[at.layer] < HEADS ? t("kv_head", { kv: kvHead(at.layer, at.head) }) : "";
    cell.setAttribute("aria-label", `${t("head", { name })}${kv}. ` +
      `${measure.name}: ${short(value)}` +
      (rankOf.has(name) ? t("rank", { rank: rankOf.get(name), heads: allHeads.length }) : ""));
  }
}

function moveCursor(cell, focus = true) {
  maps.cells.get(maps.cursor)?.setAttribute("tabindex", "-1");
  const { layer, head } = place(cell);
  maps.cursor = headName(layer, head);
  cell.setAttribute("tabindex", "0");
  if (focus) {
    cell.focus({ preventScroll: true });
    cell.scrollIntoView({ block: "nearest" });
  }
}

// The nearest map above or below, by what is on the screen, so that wrapped rows work too.
function verticalNeighbour(cell, down) {
  const from = cell.getBoundingClientRect();
  const centre = from.left + from.width / 2;
  let best = null;
  let bestCost = Infinity;
  for (const other of maps.box.querySelectorAll(".head")) {
    const to = other.getBoundingClientRect();
    const gap = down ? to.top - from.bottom : from.top - to.bottom;
    if (gap < -1) continue;
    const cost = gap * 1e4 + Math.abs(to.left + to.width / 2 - centre);
    if (cost < bestCost) [best, bestCost] = [other, cost];
  }
  return best;
}

function onMapsKey(event) {
  const cell = event.target.closest(".head");
  if (!cell || event.altKey || event.metaKey) return;
  const row = [...cell.closest(".layer").querySelectorAll(".head")];
  const all = event.ctrlKey || event.key.startsWith("Arrow")
    ? [...maps.box.querySelectorAll(".head")] : row;
  const here = all.indexOf(cell);
  const goals = {
    ArrowRight: () => all[here + 1], ArrowLeft: () => all[here - 1],
    ArrowDown: () => verticalNeighbour(cell, true), ArrowUp: () => verticalNeighbour(cell, false),
    Home: () => all[0], End: () => all.at(-1),
  };
  if (event.key in goals) {
    event.preventDefault();
    const goal = goals[event.key]();
    if (goal) moveCursor(goal);
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    const { layer, head } = place(cell);
    openHead(layer, head);
    $("#heatmap").focus({ preventScroll: true });
  }
}

// The largest maps for which a layer fills its lines evenly: one line if they stay legible, else
// two, three, ... lines of whole kv groups.
function sizeMaps() {
  const room = maps.box.clientWidth - 34;
  if (room <= 0) return;
  const groups = Math.max(...page.kvHeads);
  const units = Math.min(...page.kvHeads) === groups ? groups : HEADS;
  const gap = groups < HEADS ? 10 : 3;
  let size = 0;
  let perLine = units;
  for (; perLine > 0; perLine--) {
    if (units % perLine) continue;
    const count = (perLine * HEADS) / units;
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

function startMaps() {
  makeCells();
  arrangeMaps();
  describeMaps();
  moveCursor(maps.cells.get(headName(0, 0)), false);
  new ResizeObserver(sizeMaps).observe(maps.box);
  maps.box.addEventListener("keydown", onMapsKey);
  maps.box.addEventListener("click", (event) => {
    const cell = event.target.closest(".head");
    if (!cell) return;
    moveCursor(cell);
    openHead(Number(cell.dataset.layer), Number(cell.dataset.head));
  });
  maps.box.addEventListener("pointermove", (event) => {
    const cell = event.target.closest(".head");
    if (!cell || event.pointerType === "touch") return hideTip();
    const at = place(cell);
    const kv = page.kvHeads[at.layer] < HEADS ? t("kv_head", { kv: kvHead(at.layer, at.head) }) : "";
    const measure = measures[state.measure];
    showTip(event.clientX, event.clientY, [
      `${t("head", { name: headName(at.layer, at.head) })}${kv}`, `${measure.name}  ${short(measure.at(at))}`,
    ]);
  });
  maps.box.addEventListener("pointerleave", hideTip);
}

on(["scale", "dark", "hideFirst"], redrawThumbs);
on(["order"], () => {
  arrangeMaps();
  $("#overview").scrollTop = 0;
});
on(["measure", "descending", "query", "key", "layersRead"], () => {
  if (state.order === "rank" && isRead()) arrangeMaps();
});
on(["measure", "descending", "query", "key", "layersRead", "layer", "head", "open"], describeMaps);

// All heads as small maps, in the order and number that the toolbar asks for.

const grid = { cells: new Map(), bytes: new Map(), statistics: [], look: null, run: 0 };

const SORTS = [
  "", "induction", "duplicate", "previous_token", "first_token", "self_token", "entropy",
  "effective_keys", "max_weight", "mean_distance",
]; // "": by layer

const MOST_ACROSS = 16; // heads of a layer in one row

// Large enough to read, small enough that all heads together stay far below 2 MB.
const thumbPixels = (heads) => Math.max(16, Math.min(48, Math.floor(Math.sqrt(1.2e6 / heads))));

function makeGrid(look) {
  Object.assign(grid, { look, statistics: [], notable: null, run: grid.run + 1 });
  drawNotable();
  grid.cells.clear();
  grid.bytes.clear();
  look.heads.forEach((count, layer) => {
    for (let head = 0; head < count; head++) {
      const name = headName(layer, head);
      const cell = element("button", {
        classes: "head", type: "button", tabindex: "-1", data: `head-${name}`, "aria-label": t("head", { name }),
      }, [element("canvas", { "aria-hidden": "true" }), element("span", { classes: "head-name", text: name })]);
      Object.assign(cell.dataset, { layer, head });
      grid.cells.set(name, cell);
    }
  });
  arrange();
  polyhead.painted = fillThumbnails(grid.run);
  return polyhead.painted.then(() => fillStatistics(grid.run));
}

async function fillThumbnails(run) {
  const { look } = grid;
  const pixels = thumbPixels(grid.cells.size);
  const layers = look.heads.length;
  const asked = (layer) => askNumbers(`thumbnails/${look.look}/${layer}?pixels=${pixels}`, Uint8Array);
  let coming = asked(0);
  for (let layer = 0; layer < layers && run === grid.run; layer++) {
    const next = layer + 1 < layers ? asked(layer + 1) : null; // two at a time keep two cores busy
    next?.catch(() => {}); // a refusal is met when its turn comes
    const { shape, values } = await coming;
    coming = next;
    if (run !== grid.run) return;
    const [heads, rows, columns] = shape;
    for (let head = 0; head < heads; head++) {
      const part = values.subarray(head * rows * columns, (head + 1) * rows * columns);
      grid.bytes.set(headName(layer, head), { part, rows, columns });
      drawThumbnail(headName(layer, head));
    }
  }
}

function drawThumbnail(name) {
  const found = grid.bytes.get(name);
  if (!found) return;
  const canvas = grid.cells.get(name).firstElementChild;
  [canvas.width, canvas.height] = [found.columns, found.rows];
  paint(canvas, found.part, found.columns, found.rows);
}

// Ramp indexes 0..255 as pixels.
function paint(canvas, steps, columns, rows) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(columns, rows);
  const palette = Uint32Array.from(colours(), ({ rgb: [r, g, b] }) => (255 << 24) | (b << 16) | (g << 8) | r);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < columns * rows; i++) pixels[i] = palette[steps[i]];
  context.putImageData(image, 0, 0);
}

async function fillStatistics(run) {
  const { look } = grid;
  const layers = look.heads.length;
  for (let layer = 0; layer < layers && run === grid.run; layer++) {
    const found = await askJson(`statistics/${look.look}/${layer}`);
    if (run !== grid.run) return;
    grid.statistics[layer] = found;
    $("#progress").value = ((layer + 1) / layers) % 1; // the bar goes when all is measured
    $("#counting").textContent = layer + 1 < layers ? t("measured", { done: layer + 1, layers }) : "";
    if (layer + 1 === layers || !$("#sort").value) arrange();
    if (current && current.layer === layer) showNumbers();
  }
  const found = await askJson(`notable/${look.look}`);
  if (run !== grid.run) return;
  grid.notable = found;
  drawNotable();
}

// A sentence on the heads that do something known on this text.
function drawNotable() {
  $("#notable").hidden = !grid.notable;
  if (grid.notable) fillNotable($("#notable-text"), grid.notable, openHead);
}

const statistic = (name, { layer, head }) => grid.statistics[layer]?.[name]?.[head] ?? null;

// "0-3,7" as a set of layers; null for all.
function chosenLayers() {
  const text = $("#layers").value.trim();
  if (!text) return null;
  const found = new Set();
  for (const part of text.split(",")) {
    const [first, last = first] = part.split("-").map(Number);
    for (let layer = first; layer <= last; layer++) found.add(layer);
  }
  return found;
}

function arrange() {
  if (!grid.look) return;
  const sort = $("#sort").value;
  const least = $("#least").value === "" ? -Infinity : Number($("#least").value);
  const layers = chosenLayers();
  const all = [...grid.cells.values()].map((cell) => ({
    cell, layer: Number(cell.dataset.layer), head: Number(cell.dataset.head),
  }));
  for (const entry of all) entry.value = sort ? statistic(sort, entry) : null;
  const kept = all.filter(({ layer, value }) =>
    (!layers || layers.has(layer)) && (!sort || least === -Infinity || (value ?? -Infinity) >= least));
  if (sort) kept.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
  for (const { cell, layer, head, value } of kept) {
    const name = headName(layer, head);
    const label = sort ? name : `${head}`; // a row of the unsorted grid is a layer
    cell.lastElementChild.textContent = value === null ? label : `${label} ${value.toFixed(2)}`;
    cell.setAttribute("aria-label", value === null ? t("head", { name })
      : t("head_measured", { name, statistic: t(`stat.${sort}`), value: value.toFixed(2) }));
    cell.tabIndex = -1;
  }
  const boxes = [];
  if (sort) boxes.push(element("div", { classes: "heads" }, kept.map(({ cell }) => cell)));
  else {
    for (const [layer, row] of Map.groupBy(kept, ({ layer }) => layer)) {
      const many = row.length > MOST_ACROSS;
      const heads = element("div", { classes: many ? "heads many" : "heads" }, row.map(({ cell }) => cell));
      heads.style.setProperty("--across", row.length);
      boxes.push(element("div", { classes: "layer" }, [
        element("span", { classes: "layer-name", text: String(layer) }), heads,
      ]));
    }
  }
  $("#grid").replaceChildren(...boxes);
  if (kept.length) kept[0].cell.tabIndex = 0;
  $("#shown").textContent = kept.length === all.length ? t("heads", { all: all.length })
    : t("some_heads", { some: kept.length, all: all.length });
}

// Arrow keys walk through the heads as they lie on the screen.
function walkGrid(event) {
  const cells = [...$("#grid").querySelectorAll("button.head")];
  const here = cells.indexOf(document.activeElement);
  if (here < 0) return;
  const box = cells[here].getBoundingClientRect();
  const near = (cell) => Math.abs(cell.getBoundingClientRect().left - box.left);
  const below = (sign) => cells
    .filter((cell) => sign * (cell.getBoundingClientRect().top - box.top) > 4)
    .sort((a, b) => sign * (a.getBoundingClientRect().top - b.getBoundingClientRect().top) || near(a) - near(b))[0];
  const next = {
    ArrowRight: () => cells[here + 1], ArrowLeft: () => cells[here - 1], Home: () => cells[0],
    End: () => cells.at(-1), ArrowDown: () => below(1), ArrowUp: () => below(-1),
  }[event.key]?.();
  if (!next) return;
  event.preventDefault();
  cells[here].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

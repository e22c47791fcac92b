// The enlarged head: a heat map with the tokens on both axes, a cursor and exact weights.
// Only the part in view is drawn; the canvas stays put while its box scrolls under it.

const large = {
  box: $("#large"), room: $("#large-room"), canvas: $("#heatmap"),
  cell: 0, left: 0, top: 0, // CSS pixels: side of a cell, room for the axes
  picture: document.createElement("canvas"), pictureOf: "",
};

const EDGE = 3; // room around the cells for the ring on one at the edge, in CSS pixels
const MIN_LABELLED = 12; // smallest cell, in CSS pixels, beside which a label can be read

function fontOf(weightName = "400") {
  return `${weightName} 12px ${getComputedStyle(document.body).fontFamily}`;
}

// A colour of the style sheet as the canvas understands it: resolved for the theme in use.
const probe = document.body.appendChild(element("span", { classes: "unseen", "aria-hidden": "true" }));

function cssColour(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

// One pixel for each weight; scaled up without smoothing when drawn.
function paintPicture() {
  const of = [state.layer, state.head, state.scale, state.hideFirst, state.dark].join();
  if (of === large.pictureOf) return;
  large.pictureOf = of;
  large.picture.width = large.picture.height = TOKENS;
  const context = large.picture.getContext("2d");
  const image = context.createImageData(TOKENS, TOKENS);
  const colours = shades();
  const steps = new Int16Array(TOKENS * TOKENS);
  shade(state.layer, state.head, steps);
  steps.forEach((index, i) => {
    if (index >= 0) image.data.set([...colours[index].rgb, 255], 4 * i);
  });
  context.putImageData(image, 0, 0);
}

// Chooses the size of a cell: as large as fits, or large enough for every label.
function sizeLarge() {
  if (!state.open || !TOKENS || !large.box.clientWidth) return;
  const context = large.canvas.getContext("2d");
  context.font = fontOf();
  const widest = Math.max(...tokens.map((_, i) => context.measureText(label(i)).width));
  const width = large.box.parentElement.clientWidth;
  const margin = Math.ceil(Math.min(widest + 14, width < 480 ? 76 : 112));
  Object.assign(large, { left: margin + 22, top: margin + 22 });
  const panel = $("#panel");
  const above = large.box.getBoundingClientRect().top - panel.getBoundingClientRect().top +
    panel.scrollTop;
  const scrolls = getComputedStyle(panel).overflowY === "auto";
  // What is left of the panel, if that makes cells of a good size; else what a scrolled panel shows.
  const left = panel.clientHeight - above - 20;
  const height = !scrolls ? Math.max(width, 420)
    : left - large.top >= 22 * TOKENS ? left
      : Math.max(left, Math.min(width, panel.clientHeight - 56));
  const dpr = devicePixelRatio || 1;
  const fit = Math.min((width - large.left - EDGE) / TOKENS, (height - large.top - EDGE) / TOKENS, 44);
  const wanted = state.zoom === "labels" ? Math.max(15, fit) : Math.max(1.5, fit);
  // Whole device pixels keep large cells equal; tiny cells would lose too much room to that.
  large.cell = wanted * dpr < 5 ? wanted : Math.floor(wanted * dpr) / dpr;
  const side = large.cell * TOKENS;
  large.room.style.width = `${large.left + side + EDGE}px`;
  large.room.style.height = `${large.top + side + EDGE}px`;
  large.box.style.height = `${Math.min(height, Math.ceil(large.top + side + EDGE))}px`;
  $("#zoom").hidden = fit >= MIN_LABELLED;
  const [viewWidth, viewHeight] = [large.box.clientWidth, large.box.clientHeight];
  large.canvas.width = Math.round(viewWidth * dpr);
  large.canvas.height = Math.round(viewHeight * dpr);
  large.canvas.style.width = `${viewWidth}px`;
  large.canvas.style.height = `${viewHeight}px`;
  Object.assign(large.canvas.dataset, { cell: large.cell, left: large.left, top: large.top });
  drawLarge();
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const characters = [...text];
  while (characters.length > 1 && context.measureText(`${characters.join("")}…`).width > width) {
    characters.pop();
  }
  return `${characters.join("")}…`;
}

// The token that rows and columns are lit for: the cell's, else the running text's, else the pair's.
function lit() {
  if (state.cellQuery >= 0) return { query: state.cellQuery, key: state.cellKey };
  if (state.token >= 0) return { query: state.token, key: state.token };
  return { query: state.query, key: state.key };
}

function drawLarge() {
  if (!state.open || state.layer < 0 || !packed[state.layer] || !TOKENS || !large.cell) return;
  paintPicture();
  const { cell, left, top } = large;
  const context = large.canvas.getContext("2d");
  const dpr = devicePixelRatio || 1;
  const width = large.canvas.width / dpr;
  const height = large.canvas.height / dpr;
  const x0 = left - large.box.scrollLeft;
  const y0 = top - large.box.scrollTop;
  const side = cell * TOKENS;
  context.setTransform(dpr, 0, 0, dpr, 0, 0);
  context.clearRect(0, 0, width, height);

  context.save();
  context.beginPath();
  context.rect(left - EDGE, top - EDGE, width - left + EDGE, height - top + EDGE);
  context.clip();
  context.imageSmoothingEnabled = false;
  context.drawImage(large.picture, x0, y0, side, side);
  if (state.hideFirst) hatch(context, x0, y0, cell, side);
  if (cell >= MIN_LABELLED) drawSeams(context, x0, y0, side);
  drawBands(context, x0, y0, side);
  context.restore();

  drawAxis(context, x0, width, true);
  drawAxis(context, y0, height, false);
  context.font = fontOf();
  context.fillStyle = cssColour("--muted");
  context.textAlign = "right";
  context.textBaseline = "alphabetic";
  context.fillText(t("axis_key"), left - 8, 14);
  context.fillText(t("axis_query"), left - 8, 30);
}

function hatch(context, x, y, width, height) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = cssColour("--rule-strong");
  context.lineWidth = 1;
  context.beginPath();
  for (let offset = -width; offset < height; offset += 6) {
    context.moveTo(x, y + offset + width);
    context.lineTo(x + width, y + offset);
  }
  context.stroke();
  context.restore();
}

function drawSeams(context, x0, y0, side) {
  context.strokeStyle = cssColour("--panel");
  context.lineWidth = 1;
  context.beginPath();
  for (let i = 1; i < TOKENS; i++) {
    const offset = Math.round(i * large.cell) + 0.5 - 1;
    context.moveTo(x0 + offset, y0);
    context.lineTo(x0 + offset, y0 + side);
    context.moveTo(x0, y0 + offset);
    context.lineTo(x0 + side, y0 + offset);
  }
  context.stroke();
}

// Thin lines along the lit row and column; a ring on the pinned pair and on the cursor's cell.
function drawBands(context, x0, y0, side) {
  const { cell } = large;
  const ring = (query, key, colour, grow) => {
    context.strokeStyle = colour;
    context.lineWidth = 2;
    const extra = Math.max(0, 8 - cell) / 2 + grow;
    context.strokeRect(x0 + key * cell - extra, y0 + query * cell - extra,
      cell + 2 * extra, cell + 2 * extra);
  };
  const { query, key } = lit();
  if (state.cellQuery >= 0 || state.token >= 0) {
    context.strokeStyle = cssColour("--ink");
    context.lineWidth = 1;
    if (query >= 0) context.strokeRect(x0 + 0.5, y0 + query * cell - 0.5, side - 1, cell + 1);
    if (key >= 0) context.strokeRect(x0 + key * cell - 0.5, y0 + 0.5, cell + 1, side - 1);
  }
  ring(state.query, state.key, cssColour("--in"), 1);
  if (state.cellQuery >= 0) ring(query, key, cssColour("--ink"), 0);
}

// Token labels where they fit; otherwise every so many indexes, and the lit and pinned labels.
function drawAxis(context, start, end, isKey) {
  const { cell, left, top } = large;
  const from = isKey ? left : top;
  const focus = isKey ? lit().key : lit().query;
  const pinned = isKey ? state.key : state.query;
  const all = cell >= MIN_LABELLED;
  const every = all ? 1 : [5, 10, 20, 50, 100].find((n) => n * cell >= 26) ?? 200;
  const chosen = new Set([pinned, focus].filter((i) => i >= 0));
  const middle = (index) => start + (index + 0.5) * cell;
  const drawOne = (index, text, strong, isNumber = false) => {
    const at = middle(index);
    if (at < from || at > end) return;
    context.save();
    context.font = fontOf(strong ? "600" : "400");
    context.fillStyle = cssColour(strong ? "--ink" : all ? "--soft" : "--muted");
    context.textBaseline = isNumber && isKey ? "bottom" : "middle";
    context.textAlign = isKey ? "left" : "right";
    if (isKey) {
      context.translate(at, top - 6);
      if (isNumber) context.textAlign = "center";
      else context.rotate(-Math.PI / 2);
    } else {
      context.translate(left - 6, at);
    }
    context.fillText(shortened(context, text, (isKey ? top : left) - 12), 0, 0);
    context.restore();
  };
  for (let index = 0; index < TOKENS; index += every) {
    if (chosen.has(index)) continue;
    const near = !all && [...chosen].some((i) => Math.abs(middle(i) - middle(index)) < 15);
    if (!near) drawOne(index, all ? label(index) : String(index), false, !all);
  }
  // The pinned label gives way to the lit one where both would overlap.
  if (focus >= 0) drawOne(focus, label(focus), true);
  if (pinned !== focus && (all || Math.abs(middle(pinned) - middle(focus)) >= 15)) {
    drawOne(pinned, label(pinned), true);
  }
}

// ---- the readout: query, key and the exact weight ----

function readout() {
  const line = $("#readout");
  if (!state.open || state.layer < 0 || !TOKENS || !packed[state.layer]) {
    return line.replaceChildren();
  }
  const isCell = state.cellQuery >= 0;
  const query = isCell ? state.cellQuery : state.query;
  const key = isCell ? state.cellKey : state.key;
  const value = weight(state.layer, state.head, query, key);
  line.replaceChildren(
    element("span", { classes: "kind", text: t(isCell ? "cell" : "pair") }),
    element("b", { text: visible(query), data: "readout-query", dir: "auto" }),
    element("span", { classes: "index", text: String(query), data: "readout-query-index" }),
    element("span", { classes: "index", text: "→" }),
    element("b", { text: visible(key), data: "readout-key", dir: "auto" }),
    element("span", { classes: "index", text: String(key), data: "readout-key-index" }),
    element("output", { text: exact(value), data: "readout-weight" }),
  );
}

function cellAt(event) {
  const box = large.canvas.getBoundingClientRect();
  const x = event.clientX - box.left;
  const y = event.clientY - box.top;
  if (x < large.left || y < large.top) return null;
  const key = Math.floor((x - large.left + large.box.scrollLeft) / large.cell);
  const query = Math.floor((y - large.top + large.box.scrollTop) / large.cell);
  return key < TOKENS && query < TOKENS ? { query, key } : null;
}

function leaveCell() {
  hideTip();
  set({ cellQuery: -1, cellKey: -1 });
}

function onLargeKey(event) {
  if (!TOKENS || event.altKey || event.metaKey || event.ctrlKey) return;
  const here = state.cellQuery >= 0
    ? { query: state.cellQuery, key: state.cellKey } : { query: state.query, key: state.key };
  const last = TOKENS - 1;
  const moves = {
    ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1],
    Home: [0, -TOKENS], End: [0, TOKENS],
  };
  if (event.key in moves) {
    event.preventDefault();
    const [down, right] = moves[event.key];
    const query = Math.min(last, Math.max(0, here.query + down));
    const key = Math.min(last, Math.max(0, here.key + right));
    showCell(query, key);
    set({ cellQuery: query, cellKey: key });
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    set({ query: here.query, key: here.key });
  }
}

// Scrolls the box until the cell is in view.
function showCell(query, key) {
  const { box, cell, left, top } = large;
  const into = (at, size, scroll) => Math.max(Math.min(scroll, at), at + cell - size);
  box.scrollLeft = into(key * cell, box.clientWidth - left - EDGE, box.scrollLeft);
  box.scrollTop = into(query * cell, box.clientHeight - top - EDGE, box.scrollTop);
}

function startLarge() {
  new ResizeObserver(sizeLarge).observe(large.box.parentElement);
  new ResizeObserver(sizeLarge).observe($("#panel"));
  large.box.addEventListener("scroll", drawLarge, { passive: true });
  large.canvas.addEventListener("pointermove", (event) => {
    const cell = cellAt(event);
    if (!cell) return leaveCell();
    set({ cellQuery: cell.query, cellKey: cell.key });
    const value = weight(state.layer, state.head, cell.query, cell.key);
    showTip(event.clientX, event.clientY, [
      `${apart(visible(cell.query))} → ${apart(visible(cell.key))}`,
      `${exact(value)}   (${cell.query}, ${cell.key})`,
    ]);
  });
  large.canvas.addEventListener("pointerleave", leaveCell);
  large.canvas.addEventListener("blur", leaveCell);
  large.canvas.addEventListener("click", (event) => {
    const cell = cellAt(event);
    if (cell) set(cell);
  });
  large.canvas.addEventListener("keydown", onLargeKey);
}

on(["layer", "head", "open", "zoom", "layersRead"], sizeLarge);
on(["scale", "hideFirst", "dark", "query", "key", "token", "cellQuery", "cellKey"], drawLarge);
on(["layer", "head", "open", "query", "key", "cellQuery", "cellKey", "layersRead"], readout);

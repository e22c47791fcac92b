// How an enlarged head is drawn. Only the part in view is: the canvas stays put while its box scrolls.

function fontOf(weightName = "400") {
  return `${weightName} 12px ${getComputedStyle(document.body).fontFamily}`;
}

// A colour of the style sheet as the canvas understands it: resolved for the theme in use.
const probe = document.body.appendChild(element("span", { classes: "unseen", "aria-hidden": "true" }));

function cssColour(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  const characters = [...text];
  while (characters.length > 1 && context.measureText(`${characters.join("")}…`).width > width) {
    characters.pop();
  }
  return `${characters.join("")}…`;
}

class DrawnMap extends LargeMap {
  draw() {
    if (!this.isShown || !this.cell) return;
    this.settle();
    const { map } = this;
    if (!map) return this.wait();
    this.paintPicture(map);
    const { cell, left, top } = this;
    const context = this.canvas.getContext("2d");
    const dpr = devicePixelRatio || 1;
    const [width, height] = [this.canvas.width / dpr, this.canvas.height / dpr];
    const [x0, y0] = [left - this.box.scrollLeft, top - this.box.scrollTop];
    const [wide, high] = [cell * map.columns, cell * map.rows];
    context.setTransform(dpr, 0, 0, dpr, 0, 0);
    context.clearRect(0, 0, width, height);

    context.save();
    context.beginPath();
    context.rect(left - EDGE, top - EDGE, width - left + EDGE, height - top + EDGE);
    context.clip();
    context.imageSmoothingEnabled = false;
    context.drawImage(this.picture, x0, y0, wide, high);
    if (state.hideFirst && this.ends.k0 === 0) hatch(context, x0, y0, cell, high);
    if (cell >= MIN_LABELLED) drawSeams(context, x0, y0, map, cell);
    this.drawBands(context, x0, y0, map);
    context.restore();

    this.drawAxis(context, x0, width, true, map);
    this.drawAxis(context, y0, height, false, map);
    context.font = fontOf();
    context.fillStyle = cssColour("--muted");
    context.textAlign = "right";
    context.textBaseline = "alphabetic";
    context.fillText(t("axis_key"), left - 8, 14);
    context.fillText(t("axis_query"), left - 8, 30);
  }

  // One pixel for each cell; scaled up without smoothing when drawn.
  paintPicture(map) {
    const of = [this.of, state.layer, state.head, state.scale, state.hideFirst, state.dark, Object.values(this.ends)].join();
    if (of === this.pictureOf && this.pictureMap === map) return;
    Object.assign(this, { pictureOf: of, pictureMap: map });
    const { rows, columns } = map;
    const { q0, k0 } = this.ends;
    const coloured = { ...map, values: map.values };
    // Only rows that are there in full can be shared out anew.
    if (state.hideFirst && this.isWhole && map.cell === 1) {
      coloured.values = map.values.slice();
      withoutFirst(coloured);
    }
    const steps = shaded(coloured, { triangle: this.look.layers[state.layer].triangle, q0, k0, first: Number(state.hideFirst) });
    this.picture.width = columns;
    this.picture.height = rows;
    const context = /** @type {CanvasRenderingContext2D} */ (this.picture.getContext("2d"));
    const image = context.createImageData(columns, rows);
    const words = new Uint32Array(image.data.buffer);
    const colours = shades();
    steps.forEach((index, i) => {
      if (index >= 0) words[i] = colours[index].word;
    });
    context.putImageData(image, 0, 0);
  }

  // The cell of a token along one side, counted in the map.
  cellOf(token, isKey) {
    const { queries, keys } = this.look.layers[state.layer];
    const { q0, k0 } = this.ends;
    return (token - (isKey ? keys[0] + k0 : queries[0] + q0)) / this.map.cell;
  }

  // The token that rows and columns are lit for: the cell's, else the running text's, else the pair's.
  lit() {
    if (this.at.query >= 0) return this.at;
    if (!this.second && state.token >= 0) return { query: state.token, key: state.token };
    return this.pinned;
  }

  // Thin lines along the lit row and column; a ring on the pinned pair and on the cursor's cell.
  drawBands(context, x0, y0, map) {
    const { cell } = this;
    const ring = ({ query, key }, colour, grow) => {
      context.strokeStyle = colour;
      context.lineWidth = 2;
      const extra = Math.max(0, 8 - cell) / 2 + grow;
      const [row, column] = [Math.floor(this.cellOf(query, false)), Math.floor(this.cellOf(key, true))];
      context.strokeRect(x0 + column * cell - extra, y0 + row * cell - extra, cell + 2 * extra, cell + 2 * extra);
    };
    const { query, key } = this.lit();
    const isLit = this.at.query >= 0 || (!this.second && state.token >= 0);
    if (isLit) {
      context.strokeStyle = cssColour("--ink");
      context.lineWidth = 1;
      const [row, column] = [Math.floor(this.cellOf(query, false)), Math.floor(this.cellOf(key, true))];
      if (row >= 0 && row < map.rows) context.strokeRect(x0 + 0.5, y0 + row * cell - 0.5, cell * map.columns - 1, cell + 1);
      if (column >= 0 && column < map.columns) context.strokeRect(x0 + column * cell - 0.5, y0 + 0.5, cell + 1, cell * map.rows - 1);
    }
    ring(this.pinned, cssColour("--in"), 1);
    if (this.at.query >= 0) ring(this.at, cssColour("--ink"), 0);
  }

  // Token labels where they fit; otherwise every so many indexes, and the lit and pinned labels.
  drawAxis(context, start, end, isKey, map) {
    const { cell, left, top } = this;
    const { queries, keys } = this.look.layers[state.layer];
    const { q0, k0 } = this.ends;
    const [count, first] = isKey ? [map.columns, keys[0] + k0] : [map.rows, queries[0] + q0];
    const from = isKey ? left : top;
    const side = isKey ? "key" : "query";
    const inside = (token) => {
      const at = Math.floor(this.cellOf(token, isKey));
      return token >= 0 && at >= 0 && at < count ? at : -1;
    };
    const [focus, pinned] = [this.lit()[side], this.pinned[side]];
    const all = cell >= MIN_LABELLED && map.cell === 1;
    const every = all ? 1 : [5, 10, 20, 50, 100].find((n) => n * cell >= 26) ?? 200;
    const chosen = new Set([inside(pinned), inside(focus)].filter((at) => at >= 0));
    const middle = (at) => start + (at + 0.5) * cell;
    const drawOne = (at, text, strong, isNumber = false) => {
      const x = middle(at);
      if (at < 0 || x < from || x > end) return;
      context.save();
      context.font = fontOf(strong ? "600" : "400");
      context.fillStyle = cssColour(strong ? "--ink" : all ? "--soft" : "--muted");
      context.textBaseline = isNumber && isKey ? "bottom" : "middle";
      context.textAlign = isKey ? "left" : "right";
      if (isKey) {
        context.translate(x, top - 6);
        if (isNumber) context.textAlign = "center";
        else context.rotate(-Math.PI / 2);
      } else {
        context.translate(left - 6, x);
      }
      context.fillText(shortened(context, text, (isKey ? top : left) - 12), 0, 0);
      context.restore();
    };
    for (let at = 0; at < count; at += every) {
      if (chosen.has(at)) continue;
      const near = !all && [...chosen].some((i) => Math.abs(middle(i) - middle(at)) < 15);
      const token = first + at * map.cell;
      if (!near) drawOne(at, all ? this.look.labels[token] : String(token), false, !all);
    }
    // The pinned label gives way to the lit one where both would overlap.
    drawOne(inside(focus), this.look.labels[focus] ?? "", true);
    if (pinned !== focus && (all || Math.abs(middle(inside(pinned)) - middle(inside(focus))) >= 15)) {
      drawOne(inside(pinned), this.look.labels[pinned] ?? "", true);
    }
  }
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

function drawSeams(context, x0, y0, { rows, columns }, cell) {
  context.strokeStyle = cssColour("--panel");
  context.lineWidth = 1;
  context.beginPath();
  const at = (i) => Math.round(i * cell) + 0.5 - 1;
  for (let i = 1; i < columns; i++) {
    context.moveTo(x0 + at(i), y0);
    context.lineTo(x0 + at(i), y0 + cell * rows);
  }
  for (let i = 1; i < rows; i++) {
    context.moveTo(x0, y0 + at(i));
    context.lineTo(x0 + cell * columns, y0 + at(i));
  }
  context.stroke();
}

// ---- the two maps ----

const large = new DrawnMap($("#large-a"), false);
const largeBeside = new DrawnMap($("#large-b"), true);
const bothMaps = [large, largeBeside];

function showMaps() {
  $("#large-b").hidden = !beside;
  $("#maps-beside").classList.toggle("two", Boolean(beside));
  $("#beside-note").textContent = beside ? `${beside.model}: ${middleCut(beside.title, 80)}` : "";
}

function startLarge() {
  $("#zoom-in").addEventListener("click", () => bothMaps.forEach((map) => map.isShown && map.zoom(1 / 1.5)));
  $("#zoom-out").addEventListener("click", () => bothMaps.forEach((map) => map.isShown && map.zoom(1.5)));
}

on(["look"], showMaps);
on(["layer", "head", "open", "zoom", "parts", "look"], () => bothMaps.forEach((map) => map.size()));
on(["scale", "hideFirst", "dark", "query", "key", "token", "cellQuery", "cellKey"], () => bothMaps.forEach((map) => map.draw()));
on(["layer", "head", "open", "query", "key", "cellQuery", "cellKey", "parts", "rows", "look"],
  () => bothMaps.forEach((map) => map.tell()));

// How small maps are drawn: a canvas for each row of them, and only rows that are in view. A canvas
// for each of a thousand heads would be a thousand layers, which a browser composites one by one.

const rowsSeen = new Set(); // rows of maps in view

const rowWatcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) rowsSeen.add(target);
    else rowsSeen.delete(target);
    drawRowOfMaps(target);
  }
}, { rootMargin: "200px" });

/** @type {WeakMap<Element, [HTMLElement, number, number][]>} */
const placesOf = new WeakMap(); // of a row: each of its maps and where it is, in pixels of the canvas

// A row whose size has changed has its maps at other places.
const rowSizes = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const row = /** @type {Element} */ (target.parentElement);
    placesOf.delete(row);
    drawRowOfMaps(row);
  }
});

function watchRows(rows) {
  rowWatcher.disconnect();
  rowSizes.disconnect();
  rowsSeen.clear();
  for (const row of rows) {
    rowWatcher.observe(row);
    rowSizes.observe(row.lastElementChild);
  }
}

// Makes the canvas as large as the row, and all of its maps stale, where they have moved.
function placeMaps(row) {
  const cells = row.lastElementChild;
  const [canvas] = cells.children;
  const box = cells.getBoundingClientRect();
  const dpr = devicePixelRatio || 1;
  canvas.width = Math.ceil(box.width * dpr);
  canvas.height = Math.ceil(box.height * dpr);
  canvas.style.width = `${canvas.width / dpr}px`;
  canvas.style.height = `${canvas.height / dpr}px`;
  /** @type {[HTMLElement, number, number][]} */
  const places = [...cells.querySelectorAll(".head")].map((cell) => {
    const { left, top } = cell.getBoundingClientRect();
    maps.stale.add(cell);
    return [cell, Math.round((left - box.left) * dpr), Math.round((top - box.top) * dpr)];
  });
  placesOf.set(row, places);
  return places;
}

// Draws the maps of a row whose data are there, where the row is in view and they are stale.
function drawRowOfMaps(row) {
  if (!rowsSeen.has(row) || !maps.size || !look.length) return;
  const places = placesOf.get(row) ?? placeMaps(row);
  const context = row.querySelector("canvas").getContext("2d");
  for (const [cell, x, y] of places) {
    if (!maps.stale.has(cell)) continue;
    const image = smallImage(place(cell), context);
    if (!image) continue;
    maps.stale.delete(cell);
    context.putImageData(image, x, y);
  }
}

const drawRowsSeen = () => rowsSeen.forEach(drawRowOfMaps);

let repaint = 0;

function redrawThumbs() {
  for (const cell of maps.cells.values()) maps.stale.add(cell);
  cancelAnimationFrame(repaint);
  repaint = requestAnimationFrame(drawRowsSeen);
}

// Each pixel takes the largest shade of the cells that it covers, so thin lines survive shrinking.
function smallImage({ layer, head }, context) {
  const small = look.small(layer, head, state.hideFirst);
  if (!small) return null;
  const { rows, columns } = small;
  const sides = look.sides(layer);
  const steps = shaded(small, {
    triangle: look.layers[layer].triangle, high: sides.rows / rows, wide: sides.columns / columns, first: Number(state.hideFirst),
  });
  const size = Math.round(maps.size * (devicePixelRatio || 1));
  const image = context.createImageData(size, size);
  const words = new Uint32Array(image.data.buffer);
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
          const step = steps[row * columns + column];
          if (step > best) best = step;
        }
      }
      if (best >= 0) words[y * size + x] = colours[best].word;
    }
  }
  return image;
}

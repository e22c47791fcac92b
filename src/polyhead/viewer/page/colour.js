// Which colour a weight takes on this page: the theme's ramp, the chosen scale, the hidden column.

const shades = () => ramps[state.dark ? "dark" : "light"];
const shadesIn = () => ramps[state.dark ? "darkIn" : "lightIn"];

// Index 0..255 into a ramp.
/** @param {number} share */
function step(share) {
  return Math.round(255 * Math.min(1, SCALES[state.scale].at(share)));
}

// Ramp indexes of a map of weights, −1 for what stays blank: keys after their query, where all are,
// and the hidden first key. `at` says which query and key a cell begins with, counted in the layer.
/** @param {Rectangle} map @param {{ triangle: boolean, q0?: number, k0?: number, high?: number, wide?: number, first?: number }} at */
function shaded({ rows, columns, cell, values }, { triangle, q0 = 0, k0 = 0, high = cell, wide = cell, first = 0 }) {
  const steps = new Int16Array(rows * columns);
  for (let row = 0; row < rows; row++) {
    const lastQuery = q0 + (row + 1) * high - 1;
    for (let column = 0; column < columns; column++) {
      const place = row * columns + column;
      const key = k0 + column * wide;
      const blank = (triangle && key > lastQuery && values[place] === 0) || key < first;
      steps[place] = blank ? -1 : step(values[place]);
    }
  }
  return steps;
}

// A row's weights as the colours see them: without the first key they are shares of the rest.
/** @param {Float32Array | null} row */
function colourRow(row) {
  if (!row || !state.hideFirst) return row;
  const rest = row.reduce((sum, x) => sum + x, 0) - row[0];
  const shares = row.map((x) => (rest > 0 ? x / rest : 0));
  shares[0] = -1;
  return shares;
}

function drawLegend() {
  const colours = shades();
  const stops = Array.from({ length: 17 }, (_, i) => colours[Math.round((i * 255) / 16)].css);
  $("#legend-bar").style.background = `linear-gradient(to right, ${stops.join(", ")})`;
  $("#legend-ticks").replaceChildren(...SCALES[state.scale].ticks.map((value) => {
    const tick = element("span", { text: value === 0.0001 ? "≤.0001" : String(value).replace(/^0\./, ".") });
    tick.style.left = `${100 * SCALES[state.scale].at(value)}%`;
    return tick;
  }));
  $(".legend").setAttribute("aria-label", t("colours_now", { scale: told(state.scale, state.scale) }) +
    (state.hideFirst ? t("colours_without") : ""));
}

on(["scale", "dark", "hideFirst", "look"], drawLegend);

// Which colour a weight takes on this page: the theme's ramp, the chosen scale, the hidden column.

const shades = () => ramps[state.dark ? "dark" : "light"];
const shadesIn = () => ramps[state.dark ? "darkIn" : "lightIn"];

// Index 0..255 into a ramp.
function step(share) {
  return Math.round(255 * Math.min(1, SCALES[state.scale].at(share)));
}

// What a row's weights are divided by for colouring: 1, or what is left without the first token.
function rest(layer, head, query) {
  if (!state.hideFirst) return 1;
  let sum = 0;
  const last = page.triangle ? query : TOKENS - 1;
  for (let key = 1; key <= last; key++) sum += weight(layer, head, query, key);
  return sum;
}

// The share that a cell is coloured by; -1 where the colours leave it out.
function colourShare(layer, head, query, key) {
  if (!state.hideFirst) return weight(layer, head, query, key);
  if (key === 0) return -1;
  const left = rest(layer, head, query);
  return left > 0 ? weight(layer, head, query, key) / left : 0;
}

// Fills `steps` [TOKENS × TOKENS] with ramp indexes of a head; -1 stays blank.
function shade(layer, head, steps) {
  steps.fill(-1);
  for (let query = 0; query < TOKENS; query++) {
    const left = rest(layer, head, query);
    const last = page.triangle ? query : TOKENS - 1;
    for (let key = state.hideFirst ? 1 : 0; key <= last; key++) {
      const share = left > 0 ? weight(layer, head, query, key) / left : 0;
      steps[query * TOKENS + key] = step(share);
    }
  }
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
  $(".legend").setAttribute("aria-label", t("colours_now", { scale: t(state.scale) }) +
    (state.hideFirst ? t("colours_without") : ""));
}

on(["scale", "dark", "hideFirst"], drawLegend);

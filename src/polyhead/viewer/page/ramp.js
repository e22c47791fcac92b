// From a weight to a colour: a single-hue ramp that is even in lightness (OKLCH), and three scales.

// Lightness runs straight from `from` to `to`; chroma is a parabola through start, rise and fall.
/** @type {Record<string, { from: number, to: number, chroma: [number, number, number], hue: [number, number] }>} */
const RAMPS = {
  light: { from: 0.972, to: 0.3, chroma: [0.008, 0.45, 0.335], hue: [246, 266] },
  dark: { from: 0.262, to: 0.955, chroma: [0.022, 0.45, 0.425], hue: [266, 236] },
  lightIn: { from: 0.93, to: 0.52, chroma: [0.02, 0.32, 0.2], hue: [75, 45] },
  darkIn: { from: 0.33, to: 0.84, chroma: [0.02, 0.34, 0.22], hue: [45, 75] },
};

// OKLCH to 8-bit sRGB (Ottosson 2020, https://bottosson.github.io/posts/oklab/).
/** @param {number} lightness @param {number} chroma @param {number} degrees */
function srgb(lightness, chroma, degrees) {
  const angle = (degrees * Math.PI) / 180;
  const a = chroma * Math.cos(angle);
  const b = chroma * Math.sin(angle);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((x) => {
    const y = Math.min(1, Math.max(0, x));
    return Math.round(255 * (y <= 0.0031308 ? 12.92 * y : 1.055 * y ** (1 / 2.4) - 0.055));
  });
}

/** @param {number[]} rgb */
function luminance(rgb) {
  const [r, g, b] = rgb.map((x) => {
    const y = x / 255;
    return y <= 0.04045 ? y / 12.92 : ((y + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

// 256 colours: as 8-bit sRGB, for style sheets, as the number that image data hold on little-endian
// machines, and the ink (black or white) that reads best on each.
/** @param {{ from: number, to: number, chroma: number[], hue: number[] }} parts */
function ramp({ from, to, chroma: [c0, c1, c2], hue: [h0, h1] }) {
  return Array.from({ length: 256 }, (_, i) => {
    const t = i / 255;
    const rgb = srgb(from + (to - from) * t, c0 + c1 * t - c2 * t * t, h0 + (h1 - h0) * t);
    const [red, green, blue] = rgb;
    const word = ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
    return { rgb, word, css: `rgb(${rgb.join(" ")})`, ink: luminance(rgb) > 0.179 ? "#000" : "#fff" };
  });
}

const ramps = Object.fromEntries(Object.entries(RAMPS).map(([name, parts]) => [name, ramp(parts)]));

const LOG_DECADES = 4;

/** @type {Record<string, { at: (share: number) => number, ticks: number[] }>} */
const SCALES = {
  linear: { at: (x) => x, ticks: [0, 0.25, 0.5, 0.75, 1] },
  sqrt: { at: Math.sqrt, ticks: [0, 0.01, 0.1, 0.3, 0.6, 1] },
  log: {
    at: (x) => (x > 10 ** -LOG_DECADES ? 1 + Math.log10(x) / LOG_DECADES : 0),
    ticks: [0.0001, 0.001, 0.01, 0.1, 1],
  },
};

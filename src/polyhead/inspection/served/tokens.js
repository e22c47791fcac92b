// The part of the text that the map shows, as two columns of tokens with a line per strong weight.

const LINE_TOKENS = 32;
const LEAST_LINE = 0.05;
const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

let linesAsked = 0;

async function drawLines() {
  if (!current) return;
  const asked = ++linesAsked;
  const map = maps[0];
  const { q0, q1, k0 } = map.ends;
  const tokens = map.look.tokens.length;
  const first = map.window.size > LINE_TOKENS ? Math.max(0, q1 - LINE_TOKENS) : q0;
  const keys = map.window.size > LINE_TOKENS ? first : k0;
  const stops = [first, keys].map((start) => Math.min(tokens, start + LINE_TOKENS));
  const words = new URLSearchParams({ q0: first, q1: stops[0], k0: keys, k1: stops[1], pixels: LINE_TOKENS });
  const address = `region/${map.look.look}/${current.layer}/${current.head}?${words}`;
  const { shape: [rows, columns], values } = await askNumbers(address, Float32Array);
  if (asked !== linesAsked) return;
  const box = $("#lines");
  // A unit of the drawing is a pixel, so that words are as large as all others.
  const [height, width] = [17, Math.max(280, Math.min(640, box.getBoundingClientRect().width || 640))];
  const [left, right] = [width * 0.34, width * 0.66];
  box.setAttribute("viewBox", `0 0 ${width} ${height * Math.max(rows, columns) + 4}`);
  const y = (i) => height * i + 12;
  const word = (i, x, anchor, row) =>
    svg("text", { x, y: y(row) + 3, "text-anchor": anchor }, map.look.labels[i].slice(0, 18));
  const parts = [];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const weight = values[row * columns + column];
      if (weight < LEAST_LINE) continue;
      parts.push(svg("line", { x1: left, y1: y(row), x2: right, y2: y(column), "stroke-opacity": weight.toFixed(3) }));
    }
  }
  for (let row = 0; row < rows; row++) parts.push(word(first + row, left - 8, "end", row));
  for (let column = 0; column < columns; column++) parts.push(word(keys + column, right + 8, "start", column));
  box.replaceChildren(...parts);
  $("#lines-note").textContent = t("lines_note", {
    q0: first, q1: stops[0] - 1, k0: keys, k1: stops[1] - 1, least: LEAST_LINE,
  });
}

// Tokens in two columns with a line for every weight that can be seen: who looks at whom.

const SVG = $("svg").namespaceURI;
const LINE_TOKENS = 32;
const LEAST_LINE = 0.05;

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// Draws queries on the left and keys on the right, each as { first, labels }. `heads` are functions
// from row and column to a weight, each in a colour of its own; lines of the `active` row stand out.
function drawLinesIn(box, { queries, keys, heads, active = -1 }) {
  const [height, width] = [17, pictureWidth(640)];
  const [left, right] = [width * 0.34, width * 0.66];
  const y = (i) => height * i + 12;
  const parts = [];
  heads.forEach((at, number) => {
    queries.labels.forEach((_, row) => keys.labels.forEach((__, column) => {
      const weight = at(row, column);
      if (weight < LEAST_LINE) return;
      const opacity = active < 0 || active === row ? weight : 0.15 * weight;
      parts.push(svg("line", {
        x1: left, y1: y(row), x2: right, y2: y(column), "stroke-opacity": opacity.toFixed(3), class: `of-${number % 6}`,
      }));
    }));
  });
  const word = (text, x, anchor, row) =>
    svg("text", { x, y: y(row) + 3, "text-anchor": anchor }, [...text].slice(0, 18).join(""));
  queries.labels.forEach((text, row) => parts.push(word(text, left - 8, "end", row)));
  keys.labels.forEach((text, column) => parts.push(word(text, right + 8, "start", column)));
  box.setAttribute("viewBox", `0 0 ${width} ${height * Math.max(queries.labels.length, keys.labels.length) + 4}`);
  box.replaceChildren(...parts);
}

function linesNote(queries, keys) {
  return t("lines_note", {
    q0: queries.first, q1: queries.first + queries.labels.length - 1,
    k0: keys.first, k1: keys.first + keys.labels.length - 1, least: LEAST_LINE,
  });
}

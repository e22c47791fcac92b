// The part of the text that the map shows, as two columns of tokens with a line per strong weight.

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
  const part = (first, count) => ({ first, labels: map.look.labels.slice(first, first + count) });
  const shown = [part(first, rows), part(keys, columns)];
  const at = (row, column) => values[row * columns + column];
  drawLinesIn($("#lines"), { queries: shown[0], keys: shown[1], heads: [at] });
  $("#lines-note").textContent = linesNote(...shown);
}

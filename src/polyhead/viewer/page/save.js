// What can be taken away: a picture, a drawing, a table, a page that needs no server.

function save(name, content, type) {
  const link = element("a", { download: name });
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const fileName = (kind) => `polyhead-${headName(state.layer, state.head)}.${kind}`;

function savePng() {
  large.picture.toBlob((blob) => save(fileName("png"), blob), "image/png");
}

// A rectangle for every weight that can be seen, in cells as units.
function saveSvg() {
  const { values, columns, rows, cell } = large.map;
  const ramp = shades();
  const parts = [];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const weight = values[row * columns + column];
      if (weight < 0.001) continue;
      const { css } = ramp[step(weight)];
      parts.push(`<rect x="${column}" y="${row}" width="1" height="1" fill="${css}"><title>${weight}</title></rect>`);
    }
  }
  save(fileName("svg"), `<svg xmlns="${SVG}" viewBox="0 0 ${columns} ${rows}" ` +
    `shape-rendering="crispEdges"><desc>${cell} × ${cell} tokens a square</desc>${parts.join("")}</svg>`, "image/svg+xml");
}

// The statistics of all heads.
function saveCsv() {
  const columns = measures.filter(({ key }) => key);
  const lines = [["layer", "head", ...columns.map(({ key }) => key)].join(",")];
  for (const head of look.heads) {
    lines.push([head.layer, head.head, ...columns.map((measure) => measure.at(head) ?? "")].join(","));
  }
  save("polyhead-heads.csv", `${lines.join("\r\n")}\r\n`, "text/csv");
}

function startSave() {
  $("#save-png").addEventListener("click", savePng);
  $("#save-svg").addEventListener("click", saveSvg);
  $("#save-csv").addEventListener("click", saveCsv);
}

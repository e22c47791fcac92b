// What can be taken away: a picture, a drawing, a table, a page that needs no server.

function save(name, content, type) {
  const link = element("a", { download: name });
  link.href = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const fileName = (kind) => `polyhead-${headName(current.layer, current.head)}.${kind}`;

function savePng() {
  maps[0].canvas.toBlob((blob) => save(fileName("png"), blob), "image/png");
}

// A rectangle for every weight that can be seen, in tokens as units.
function saveSvg() {
  const { values, columns, rows, cell } = maps[0];
  const ramp = colours();
  const parts = [];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const weight = values[row * columns + column];
      if (weight < 0.001) continue;
      const { css } = ramp[Math.round(255 * Math.sqrt(Math.min(1, weight)))];
      parts.push(`<rect x="${column}" y="${row}" width="1" height="1" fill="${css}"><title>${weight}</title></rect>`);
    }
  }
  save(fileName("svg"), `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${columns} ${rows}" ` +
    `shape-rendering="crispEdges"><desc>${cell} × ${cell} tokens a square</desc>${parts.join("")}</svg>`, "image/svg+xml");
}

// The statistics of all heads.
function saveCsv() {
  const names = SORTS.filter((name) => name && grid.statistics[0]?.[name]);
  const lines = [["layer", "head", ...names].join(",")];
  for (const cell of grid.cells.values()) {
    const at = { layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) };
    lines.push([at.layer, at.head, ...names.map((name) => statistic(name, at) ?? "")].join(","));
  }
  save("polyhead-heads.csv", `${lines.join("\r\n")}\r\n`, "text/csv");
}

async function savePage() {
  const answer = await ask(`page/${looks[0].look}`);
  save("polyhead-look.html", await answer.blob());
}

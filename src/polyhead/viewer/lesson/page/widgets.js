// Parts that the scenes share: matrices, bars, choices, sliders, drawings.

const numbers = JSON.parse($("#numbers").textContent);

const SVG = $("svg").namespaceURI;

function drawing(tag, attributes = {}, children = []) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") node.textContent = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

// A whole number as it is, others with three decimals; −∞ is a masked score.
function written(x) {
  if (x === null || x === -Infinity) return "−∞";
  if (Number.isInteger(x)) return String(x).replace("-", "−");
  return x.toFixed(3).replace("-", "−");
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function bytesWritten(count) {
  let [size, unit] = [count, 0];
  while (size >= 1024 && unit < UNITS.length - 1) [size, unit] = [size / 1024, unit + 1];
  return `${unit && size < 100 ? size.toFixed(2) : Math.round(size)} ${UNITS[unit]}`;
}

// W_Q with its index below: the letters after each _ are small.
const indexed = (text) => text.split(/_([A-Za-z]+)/).map((part, i) => (i % 2 ? element("sub", { text: part }) : part));

const counted = (x) => x.toLocaleString("en");

// A matrix with its name, its shape and labels. `lit` says which rows, columns and cells are marked;
// `chosen` and `choose` make the cells a grid that arrow keys walk through.
/**
 * @param {{
 *   name: string, values: number[][], rows?: string[], columns?: string[], shade?: boolean,
 *   lit?: (row: number, column: number) => string, chosen?: number[] | null,
 *   choose?: ((row: number, column: number, byKey?: boolean) => void) | null,
 *   change?: ((row: number, column: number, value: number) => void) | null,
 * }} parts
 */
function matrix({ name, values, rows = [], columns = [], lit = () => "", chosen = null, choose = null, change = null, shade = false }) {
  const table = element("table", { classes: "matrix", ...(choose && { role: "grid" }), "aria-label": `${name} ${values.length} × ${values[0].length}` });
  table.append(element("caption", {}, [
    element("b", {}, indexed(name)), element("span", { text: ` ${values.length} × ${values[0].length}` }),
  ]));
  if (columns.length) {
    table.append(element("thead", {}, [element("tr", {}, [
      ...(rows.length ? [element("td")] : []),
      ...columns.map((text) => element("th", { scope: "col", text })),
    ])]));
  }
  table.append(element("tbody", {}, values.map((row, i) => element("tr", {}, [
    ...(rows.length ? [element("th", { scope: "row", text: rows[i] })] : []),
    ...row.map((x, j) => {
      const cell = element("td", { classes: lit(i, j) });
      if (shade && x > 0) cell.style.setProperty("--share", String(x));
      if (change) {
        const field = element("input", {
          type: "number", step: "0.5", value: String(x), "aria-label": `${name} ${i + 1}, ${j + 1}`,
        });
        field.addEventListener("input", () => change(i, j, Number(field.value) || 0));
        cell.append(field);
      } else cell.textContent = written(x);
      if (choose) {
        const here = chosen && chosen[0] === i && chosen[1] === j;
        cell.setAttribute("role", "gridcell");
        cell.tabIndex = here ? 0 : -1;
        cell.setAttribute("aria-selected", String(Boolean(here)));
        cell.addEventListener("click", () => choose(i, j));
      }
      return cell;
    }),
  ]))));
  if (choose) {
    table.addEventListener("keydown", (event) => {
      const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!move || !chosen) return;
      event.preventDefault();
      const inside = (x, end) => Math.min(end - 1, Math.max(0, x));
      choose(inside(chosen[0] + move[0], values.length), inside(chosen[1] + move[1], values[0].length), true);
    });
  }
  return table;
}

const sign = (text) => element("span", { classes: "sign", text, "aria-hidden": "true" });
const product = (...parts) => element("div", { classes: "product" }, parts);

// Horizontal bars to one scale: [{ name, value, text, lit }].
function bars(entries, most = Math.max(...entries.map(({ value }) => value))) {
  return element("table", { classes: "bars" }, [element("tbody", {}, entries.map(({ name, value, text, lit }) => {
    const bar = element("span", { classes: "bar", "aria-hidden": "true" });
    bar.style.width = `${most > 0 ? (100 * value) / most : 0}%`;
    return element("tr", { classes: lit ? "lit" : "" }, [
      element("th", { scope: "row", text: name }), element("td", { classes: "track" }, [bar]),
      element("td", { classes: "amount", text }),
    ]);
  }))]);
}

let fields = 0;

// A slider with its name and number; `say` writes the number.
/**
 * @param {string} name
 * @param {{ least: number, most: number, step?: number, value: number, say?: (x: number) => string, changed: (x: number) => void, data?: string }} options
 */
function slider(name, { least, most, step = 1, value, say = String, changed, data }) {
  const id = `field-${++fields}`;
  const input = element("input", { type: "range", id, min: least, max: most, step, data });
  input.value = String(value);
  const output = element("output", { for: id, text: say(value) });
  input.addEventListener("input", () => {
    output.textContent = say(Number(input.value));
    input.setAttribute("aria-valuetext", say(Number(input.value)));
    changed(Number(input.value));
  });
  input.setAttribute("aria-valuetext", say(value));
  return element("div", { classes: "field" }, [element("label", { for: id, text: name }), input, output]);
}

// One of several, as radio buttons: [[value, text], …].
function choice(name, options, value, changed, data) {
  const group = `field-${++fields}`;
  return element("fieldset", { classes: "segments", data }, [
    element("legend", { classes: "unseen", text: name }),
    ...options.map(([key, text]) => {
      const input = element("input", { type: "radio", name: group, value: key, data: data && `${data}-${key}` });
      input.checked = key === value;
      input.addEventListener("change", () => input.checked && changed(key));
      return element("label", {}, [input, element("span", { text })]);
    }),
  ]);
}

function switcher(name, checked, changed, data) {
  const input = element("input", { type: "checkbox", data });
  input.checked = checked;
  input.addEventListener("change", () => changed(input.checked));
  return element("label", { classes: "check" }, [input, element("span", { text: name })]);
}

function button(text, click, attributes = {}) {
  const node = element("button", { type: "button", classes: "quiet", text, ...attributes });
  node.addEventListener("click", click);
  return node;
}

const controls = (...parts) => element("div", { classes: "controls" }, parts);
const paragraph = (text, classes = "") => element("p", { classes }, classes === "formula" ? indexed(text) : [text]);
const live = (text, data) => element("p", { classes: "live", role: "status", text, data });

// Scenes in the order of the lesson. `draw(box)` fills a box; it is called again where the language
// changes, so what a reader has set lives outside of it.
const scenes = [];

function scene(name, draw) {
  scenes.push({ name, draw });
}

// Fills the part of a scene that follows its controls, and keeps the focus where it was.
function fill(figure, ...children) {
  const focusable = "a, button, input, select";
  const active = figure.contains(document.activeElement) ? document.activeElement : null;
  const cell = active?.matches("td");
  const place = active ? [...figure.querySelectorAll(focusable)].indexOf(active) : -1;
  figure.replaceChildren(...children);
  if (cell) figure.querySelector("td[tabindex='0']")?.focus();
  else if (place >= 0) figure.querySelectorAll(focusable)[place]?.focus();
}

const figure = () => element("div", { classes: "figure" });

// The start, the two looks side by side, the open head, ablation.

const looks = [null, null];
const ablated = new Set();
let cancelling = new AbortController();
let current = null; // { layer, head } of the open head
const maps = [...document.querySelectorAll(".pane")].map((figure) => new HeadMap(figure));

function say(message) {
  $("#status").textContent = message;
  $("#status").hidden = !message;
}

// Work whose refusal is shown as a sentence.
async function run(work) {
  try {
    return await work;
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    say(error.message);
    return null;
  }
}

async function look(pane) {
  const asked = { text: $(`#text-${pane}`).value, model: $(`#model-${pane}`).value };
  const found = await askJson("look", asked, cancelling.signal);
  looks[pane] = found;
  return found;
}

// Says how far the model is, while it runs.
async function showProgress(signal) {
  while (!signal.aborted) {
    await new Promise((done) => setTimeout(done, 500));
    const { done, layers } = await askJson("progress").catch(() => ({ done: 0, layers: 0 }));
    if (signal.aborted) return;
    $("#facts").textContent = layers ? t("runs_layer", { done, layers }) : t("runs");
  }
}

async function lookAtAll() {
  say("");
  cancelling.abort(); // of the look before, if it still runs
  cancelling = new AbortController();
  const mine = cancelling;
  $("#ask").setAttribute("aria-busy", "true");
  $("#cancel").hidden = false;
  $("#facts").textContent = t("runs");
  const shown = new AbortController();
  showProgress(shown.signal);
  const first = await run(look(0));
  looks[1] = first && $("#compare").checked ? await run(look(1)) : null;
  shown.abort();
  if (mine !== cancelling) return;
  $("#ask").removeAttribute("aria-busy");
  $("#cancel").hidden = true;
  $("#facts").textContent = "";
  if (!first) return;
  document.body.classList.remove("is-empty");
  ablated.clear();
  $("#facts").textContent = looks.filter(Boolean).map(({ model, tokens, seconds }) =>
    t("ran", { model, tokens: tokens.length.toLocaleString("en"), seconds: seconds.toFixed(2) })).join(" · ");
  const kept = current && current.head < (first.heads[current.layer] ?? 0) ? current : null;
  if (kept) openHead(kept.layer, kept.head);
  else closeHead();
  await run(makeGrid(first));
}

function openHead(layer, head) {
  current = { layer, head };
  const name = headName(layer, head);
  $("#panel").hidden = false;
  document.body.classList.add("is-open");
  $("#panel-title").textContent = t("head", { name });
  for (const cell of grid.cells.values()) cell.removeAttribute("aria-current");
  grid.cells.get(name)?.setAttribute("aria-current", "true");
  $("#ablate").setAttribute("aria-pressed", String(ablated.has(name)));
  history.replaceState(null, "", `#${name}`);
  const drawn = [maps[0].show(looks[0], layer, head)];
  const second = looks[1] && head < (looks[1].heads[layer] ?? 0);
  document.querySelector('.pane[data-pane="1"]').hidden = !second;
  $("#panes").classList.toggle("two", Boolean(second));
  if (second) drawn.push(maps[1].show(looks[1], layer, head));
  showNumbers();
  showNext(looks[0].next);
  return run(Promise.all([...drawn, drawLines()]));
}

function closeHead() {
  current = null;
  $("#panel").hidden = true;
  document.body.classList.remove("is-open");
  history.replaceState(null, "", location.pathname);
}

function showNumbers() {
  const rows = SORTS.filter((name) => name && statistic(name, current) !== null);
  $("#numbers").replaceChildren(...rows.map((name) => element("div", { title: t(`stat.${name}.help`) }, [
    element("dt", { text: t(`stat.${name}`) }), element("dd", {}, [element("span", { text: statistic(name, current).toFixed(4) })]),
  ])));
}

let said = [[]]; // the arguments of the latest showNext

// The likeliest next tokens, as they are and with the chosen heads ablated.
function showNext(before, after = null) {
  said = [before, after];
  const names = [...new Set([...before, ...(after ?? [])].map(([token]) => token))];
  const at = (list, token) => list?.find(([name]) => name === token)?.[1];
  const number = (share) => (share === undefined ? "" : share.toFixed(4));
  $("#next").replaceChildren(...names.map((token) => element("tr", {}, [
    element("td", { text: token }), element("td", { text: number(at(before, token)) }),
    element("td", { text: after ? number(at(after, token)) : "" }),
  ])));
  $("#ablated").textContent = ablated.size ? t("without", { heads: [...ablated].join(", ") }) : t("none_ablated");
}

async function toggleAblation() {
  const name = headName(current.layer, current.head);
  if (!ablated.delete(name)) ablated.add(name);
  $("#ablate").setAttribute("aria-pressed", String(ablated.has(name)));
  for (const [other, cell] of grid.cells) cell.classList.toggle("is-ablated", ablated.has(other));
  const heads = [...ablated].map((other) => other.split(".").map(Number));
  const before = looks[0].next;
  showNext(before, heads.length ? (await askJson(`next/${looks[0].look}`, { heads })).next : null);
}

function repaintAll() {
  for (const name of grid.bytes.keys()) drawThumbnail(name);
  for (const map of maps) map.repaint();
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("polyhead-theme", theme);
  } catch {
    // Storage may be forbidden; the choice then lasts as long as the page.
  }
  repaintAll();
}

function nameSorts() {
  const chosen = $("#sort").value;
  $("#sort").replaceChildren(...SORTS.map((value) =>
    element("option", { value, text: value ? t(`stat.${value}`) : t("sort_layer") })));
  $("#sort").value = chosen;
}

// The language has changed: all that scripts wrote is written anew.
function sayAgain() {
  nameSorts();
  arrange();
  drawNotable();
  if (!current) return;
  $("#panel-title").textContent = t("head", { name: headName(current.layer, current.head) });
  showNumbers();
  for (const map of maps) if (map.look) map.tell();
  showNext(...said);
  run(drawLines());
}

function bind() {
  for (const pane of [0, 1]) {
    $(`#model-${pane}`).append(...begin.models.map((name) => element("option", { text: name, value: name })));
  }
  startLanguage(sayAgain);
  nameSorts();
  $("#ask").addEventListener("submit", (event) => { event.preventDefault(); polyhead.ready = lookAtAll(); });
  $("#cancel").addEventListener("click", () => cancelling.abort());
  $("#ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("#ask").requestSubmit();
  });
  $("#compare").addEventListener("change", (event) => {
    document.querySelector('.asked[data-pane="1"]').hidden = !event.target.checked;
  });
  for (const name of ["sort", "least", "layers"]) $(`#${name}`).addEventListener("input", arrange);
  $("#grid").addEventListener("click", (event) => {
    const cell = event.target.closest("button.head");
    if (cell) openHead(Number(cell.dataset.layer), Number(cell.dataset.head));
  });
  $("#grid").addEventListener("keydown", walkGrid);
  $("#close").addEventListener("click", closeHead);
  $("#ablate").addEventListener("click", () => run(toggleAblation()));
  $("#theme").addEventListener("click", switchTheme);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaintAll);
  $("#save-png").addEventListener("click", savePng);
  $("#save-svg").addEventListener("click", saveSvg);
  $("#save-csv").addEventListener("click", saveCsv);
  $("#save-page").addEventListener("click", () => run(savePage()));
  addEventListener("resize", () => { for (const map of maps) map.repaint(); });
  addEventListener("keydown", (event) => { if (event.key === "Escape" && current) closeHead(); });
}

// What tests may wait for.
globalThis.polyhead = { ready: Promise.resolve() };

bind();
$("#text-0").value = begin.text;
if (begin.text) {
  const asked = /^#(\d+)\.(\d+)$/.exec(location.hash);
  if (asked) current = { layer: Number(asked[1]), head: Number(asked[2]) };
  globalThis.polyhead.ready = lookAtAll();
}

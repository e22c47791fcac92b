// What needs a running model, on a page that a server sent: other texts and models, two side by side,
// heads ablated, the text continued. In a file these controls are not there.

const ablated = new Set(); // "layer head" of the page's layers
let cancelling = new AbortController();

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

// The ablated heads as the server counts them: in the model's own layers.
const ablatedHeads = () => [...ablated].map((name) => {
  const [layer, head] = name.split(" ").map(Number);
  return [look.layers[layer].number, head];
});
const ablatedNames = () => [...ablated].map((name) => headName(.../** @type {[number, number]} */ (name.split(" ").map(Number)))).join(", ");
const isOwn = (layer) => ["layer", "decoder"].includes(look.layers[layer]?.part);

// Says how far the model is, while it runs.
async function showProgress(signal) {
  while (!signal.aborted) {
    await new Promise((done) => setTimeout(done, 500));
    const { done, layers } = await askJson("progress").catch(() => ({ done: 0, layers: 0 }));
    if (signal.aborted) return;
    $("#asking-note").textContent = layers ? t("runs_layer", { done, layers }) : t("runs");
  }
}

async function lookAtAll(heads = []) {
  say("");
  cancelling.abort(); // of the look before, if it still runs
  cancelling = new AbortController();
  const mine = cancelling;
  const shown = new AbortController();
  $("#ask").setAttribute("aria-busy", "true");
  $("#cancel").hidden = false;
  $("#asking-note").textContent = t("runs");
  showProgress(shown.signal);
  const one = async (pane) => {
    const asked = { text: $(`#text-${pane}`).value, model: $(`#model-${pane}`).value, heads };
    return run(askJson("look", asked, mine.signal));
  };
  const first = await one(0);
  const second = first && $("#compare").checked ? await one(1) : null;
  shown.abort();
  if (mine !== cancelling) return;
  $("#ask").removeAttribute("aria-busy");
  $("#cancel").hidden = true;
  $("#asking-note").textContent = "";
  if (!first) return;
  ablated.clear();
  const of = (header) => header && new Look(header, new ServerSource(header));
  const made = { first: of(first), second: of(second) };
  showLooks(made.first, made.second);
  drawAsked(heads);
  polyhead.painted = made.first.source.read((layer) => arrivedLayer(made.first, layer));
  await run(polyhead.painted.then(() => measureAll(made.first, made.second)));
}

// "smollm2: 30 tokens in 0.12 s"
function drawAsked(heads = []) {
  $("#asking-note").textContent = (beside ? [look, beside] : [look]).map(({ model, tokens, seconds = 0 }) =>
    t("ran", { model, tokens: tokens.length.toLocaleString("en"), seconds: seconds.toFixed(2) })).join(" · ") +
    (heads.length ? ` · ${t("without", { heads: heads.map((pair) => pair.join(".")).join(", ") })}` : "");
}

// The statistics of all heads, a layer after the other, then what is notable.
/** @param {Look} first @param {Look | null} second */
async function measureAll(first, second) {
  const count = first.layers.length;
  for (let layer = 0; layer < count && first === look; layer++) {
    first.statistics[layer] = await first.source.statistics(layer);
    if (second && layer < second.layers.length) second.statistics[layer] = await second.source.statistics(layer);
    if (first !== look) return;
    $("#progress").hidden = layer + 1 === count;
    Object.assign($("#progress"), { max: count, value: layer + 1 });
    set({ measured: layer + 1 });
  }
  const found = await askJson(`notable/${first.look}`);
  if (first !== look) return;
  look.notable = found;
  drawNotable();
  openNotable();
}

function drawAblation() {
  const own = isOwn(state.layer);
  const button = $("#ablate");
  button.hidden = !page.served || !own;
  button.setAttribute("aria-pressed", String(ablated.has(`${state.layer} ${state.head}`)));
  $("#ablated").textContent = ablated.size ? t("without", { heads: ablatedNames() }) : t("none_ablated");
  $("#look-without").hidden = !ablated.size;
}

async function toggleAblation() {
  const name = `${state.layer} ${state.head}`;
  if (!ablated.delete(name)) ablated.add(name);
  maps.cells.get(headName(state.layer, state.head)).classList.toggle("is-ablated", ablated.has(name));
  drawAblation();
  const mine = look;
  const found = ablated.size ? await askJson(`next/${look.look}`, { heads: ablatedHeads() }) : null;
  if (mine !== look) return;
  next.without = found?.next ?? null;
  drawNext();
}

// Continues the text with the chosen temperature and top-k, and without the ablated heads.
async function writeOn() {
  const count = Number($("#write-count").value);
  const asked = {
    max_new_tokens: count, temperature: look.temperatures[next.temperature], heads: ablatedHeads(),
    seed: Math.floor(Math.random() * 2 ** 31), ...(next.topK ? { top_k: next.topK } : {}),
  };
  $("#written").textContent = t("runs");
  const found = await run(askJson(`write/${look.look}`, asked));
  $("#written").textContent = found?.text ?? "";
  $("#take-written").hidden = !found?.text;
}

async function savePage() {
  const words = beside ? `?beside=${beside.look}` : "";
  save("polyhead-look.html", await (await ask(`page/${look.look}${words}`)).blob());
}

function startAsking() {
  if (!page.served) return;
  document.body.classList.add("is-served");
  for (const node of elements("[data-served]")) node.hidden = false;
  for (const pane of [0, 1]) {
    $(`#model-${pane}`).append(...page.models.map((name) => element("option", { text: name, value: name })));
  }
  $("#ask").addEventListener("submit", (event) => {
    event.preventDefault();
    polyhead.ready = lookAtAll();
  });
  $("#ask").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("#ask").requestSubmit();
  });
  $("#cancel").addEventListener("click", () => cancelling.abort());
  $("#compare").addEventListener("change", (event) => { $("#asked-1").hidden = !event.target.checked; });
  $("#ablate").addEventListener("click", () => run(toggleAblation()));
  $("#look-without").addEventListener("click", () => { polyhead.ready = lookAtAll(ablatedHeads()); });
  $("#write").addEventListener("click", () => run(writeOn()));
  $("#take-written").addEventListener("click", () => {
    $("#text-0").value = look.title + $("#written").textContent;
    $("#ask").requestSubmit();
  });
  $("#save-page").addEventListener("click", () => run(savePage()));
  $("#text-0").value = page.text;
}

on(["look", "layer", "head"], drawAblation);
on(["look"], () => {
  $("#written").textContent = "";
  $("#take-written").hidden = true;
  $("#write-row").hidden = !page.served || look.kind !== "decoder";
});

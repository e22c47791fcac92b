// The load of a server: asked for each second, while the page is in view.

const SAMPLES = 120;
/** @typedef {{ seconds: number, prompt: number, output: number, written: number }} Sample */
/** @type {Map<string, Sample[]>} */
const samplesOf = new Map(); // by model, the last two minutes
let key = stored("polyhead-key");
/** @type {any} */
let latest = null;
/** @type {{ id: string, heads: number[] } | null} */
let looked = null;

// What this tab remembers; storage may be forbidden.
/** @param {string} name */
function stored(name) {
  try {
    return sessionStorage.getItem(name) ?? "";
  } catch {
    return "";
  }
}

/** @param {string} path */
async function asked(path) {
  const answer = await fetch(path, { cache: "no-store", headers: key ? { Authorization: `Bearer ${key}` } : {} });
  return { status: answer.status, found: await answer.json() };
}

/** @param {string} text */
function say(text) {
  const status = $("#status");
  if (status.textContent !== text) status.textContent = text;
  status.hidden = !text;
}

/** @param {number} number */
const whole = (number) => Math.round(number).toLocaleString(language);

// Tokens a second since the sample before, and what is drawn of them.
/** @param {any} model @param {number} seconds */
function rates(model, seconds) {
  const samples = samplesOf.get(model.name) ?? [];
  const before = samples.at(-1);
  const passed = before ? seconds - before.seconds : 0;
  const rate = (/** @type {number} */ now, /** @type {number} */ then) => (passed > 0 ? Math.max(0, now - then) / passed : 0);
  const written = before ? rate(model.output_tokens, before.output) : 0;
  const read = before ? rate(model.prompt_tokens, before.prompt) : 0;
  samples.push({ seconds, prompt: model.prompt_tokens, output: model.output_tokens, written });
  samplesOf.set(model.name, samples.slice(-SAMPLES));
  return { written, read };
}

/** @param {string} name */
function drawn(name) {
  const samples = samplesOf.get(name) ?? [];
  const most = Math.max(1, ...samples.map((each) => each.written));
  const label = t("history", { most: whole(most) });
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const attributes = { viewBox: `0 0 ${SAMPLES - 1} 1`, preserveAspectRatio: "none", class: "history", role: "img", "aria-label": label };
  for (const [attribute, value] of Object.entries(attributes)) svg.setAttribute(attribute, value);
  const base = document.createElementNS(svg.namespaceURI, "line");
  for (const [attribute, value] of Object.entries({ x1: "0", x2: `${SAMPLES - 1}`, y1: "1", y2: "1" })) base.setAttribute(attribute, value);
  const line = document.createElementNS(svg.namespaceURI, "polyline");
  const first = SAMPLES - samples.length;
  line.setAttribute("points", samples.map((each, i) => `${first + i},${1 - each.written / most}`).join(" "));
  svg.append(base, line);
  return [svg, element("p", { classes: "note", text: label })];
}

/** @param {string} label @param {string} value @param {string} more */
function figure(label, value, more = "") {
  const small = more ? [" ", element("small", { text: more })] : [];
  return element("div", {}, [element("dt", { text: label }), element("dd", {}, [value, ...small])]);
}

/** @param {number} part @param {number} all */
function meter(part, all) {
  return element("div", { classes: "meter" }, [withBar(element("span"), all > 0 ? part / all : 0)]);
}

/** @param {number} part @param {number} all */
function share(part, all) {
  return element("td", { classes: "share" }, [`${whole(part)} / ${whole(all)}`, meter(part, all)]);
}

/** @param {any} model */
function requestsOf(model) {
  if (!model.requests.length) return element("p", { classes: "note", text: t("idle") });
  const adapted = model.adapters.length > 0;
  const looks = model.heads.length > 0;
  const names = ["request", ...(adapted ? ["adapter"] : []), "prompt", "output", "time", ...(looks ? ["heads"] : [])];
  const head = element("tr", {}, names.map((name) =>
    element("th", { scope: "col", text: t(name), classes: name === "time" ? "wide" : "" })));
  const rows = model.requests.map((/** @type {any} */ each) => {
    const cells = [element("td", {}, [element("code", { text: each.id.slice(0, 6) })])];
    if (adapted) cells.push(element("td", { text: each.adapter ?? "–" }));
    cells.push(share(each.read_tokens, each.prompt_tokens), share(each.output_tokens, each.limit));
    cells.push(element("td", { classes: "wide", text: t("seconds", { n: whole(each.seconds) }) }));
    if (looks) {
      const cell = element("td");
      if (each.mine) {
        const button = element("button", { type: "button", classes: "quiet", text: t("look"), data: "look-at", "data-id": each.id, "aria-label": t("heads_of", { request: each.id.slice(0, 6) }) });
        button.addEventListener("click", () => openHeads(each.id, model.heads));
        cell.append(button);
      }
      cells.push(cell);
    }
    return element("tr", { data: "request" }, cells);
  });
  return element("table", { classes: "requests" }, [element("thead", {}, [head]), element("tbody", {}, rows)]);
}

/** @param {any} model @param {{ written: number, read: number }} rate */
function card(model, rate) {
  const title = element("h2", { text: model.name });
  if (model.requests === undefined) {
    const note = element("p", { classes: "note", text: t("one_at_a_time", { count: whole(model.waiting) }) });
    return element("section", { classes: "card", data: "model" }, [title, note]);
  }
  const all = model.used_pages + model.free_pages;
  const read = model.cached_tokens + model.prompt_tokens;
  const notes = [];
  if (read) notes.push(t("shared", { share: `${Math.round((100 * model.cached_tokens) / read)} %` }));
  if (model.preemptions) notes.push(t("preempted", { count: whole(model.preemptions) }));
  return element("section", { classes: "card", data: "model" }, [
    title,
    element("dl", { classes: "figures" }, [
      figure(t("written"), whole(rate.written)),
      figure(t("read"), whole(rate.read)),
      figure(t("running"), whole(model.live), t("of_rows", { most: whole(model.max_rows) })),
      figure(t("queued"), whole(model.queued)),
    ]),
    ...drawn(model.name),
    element("div", { classes: "pages" }, [
      element("p", {}, [
        element("span", { text: t("pages", { size: model.page_size }) }),
        element("span", { text: t("pages_said", { used: whole(model.used_pages), free: whole(model.free_pages) }) }),
      ]),
      meter(model.used_pages, all),
      element("p", {}, [element("span", { text: notes.join(" · ") })]),
    ]),
    requestsOf(model),
  ]);
}

let rated = new Map();

function show() {
  if (!latest) return;
  const box = $("#models");
  const focused = focusedIn(box)?.dataset.id;
  box.replaceChildren(...latest.models.map((/** @type {any} */ model) => card(model, rated.get(model.name))));
  if (focused) $(`[data-id="${CSS.escape(focused)}"]`, box)?.focus();
}

/** @param {boolean} needed @param {string} words */
function askForKey(needed, words = "") {
  const form = $("#enter");
  if (needed && form.hidden) {
    form.hidden = false;
    $("#models").replaceChildren();
    latest = null;
    closeHeads();
    $("#key").focus();
  }
  if (!needed) form.hidden = true;
  say(words);
}

async function refresh() {
  try {
    const { status, found } = await asked("load");
    if (status === 401) {
      askForKey(true, key ? t("wrong_key") : "");
    } else if (status === 200) {
      askForKey(false);
      latest = found;
      rated = new Map(found.models.filter((/** @type {any} */ each) => each.requests)
        .map((/** @type {any} */ each) => [each.name, rates(each, found.seconds)]));
      show();
    } else {
      say(found.error.message);
    }
  } catch {
    say(t("gone"));
  }
}

// ---- what a head looks at ----

/** @param {string} id @param {number[]} heads of each layer */
function openHeads(id, heads) {
  looked = { id, heads };
  $("#heads").hidden = false;
  $("#heads-title").textContent = t("heads_of", { request: id.slice(0, 6) });
  $("#layer").replaceChildren(...heads.map((_, layer) => element("option", { value: layer, text: `${layer}` })));
  countHeads();
  lookAt();
}

function countHeads() {
  const count = looked?.heads[$("#layer").value] ?? 0;
  $("#head").replaceChildren(...Array.from({ length: count }, (_, head) => element("option", { value: head, text: `${head}` })));
}

function closeHeads() {
  looked = null;
  $("#heads").hidden = true;
  $("#text").replaceChildren();
  $("#head-said").textContent = "";
}

async function lookAt() {
  if (!looked) return;
  const [layer, head] = [$("#layer").value, $("#head").value];
  const where = new URLSearchParams({ request: looked.id, layer, head });
  try {
    const { status, found } = await asked(`load/head?${where}`);
    if (status === 404) {
      $("#head-said").textContent = t("head_gone");
    } else if (status === 200) {
      $("#head-said").textContent = t("head_said", { layer, head });
      const most = Math.max(...found.weights);
      $("#text").replaceChildren(...found.tokens.map((/** @type {string} */ text, /** @type {number} */ i) =>
        withBar(element("span", { text, title: found.weights[i].toFixed(4) }), 0.75 * Math.sqrt(found.weights[i] / (most || 1)))));
    } else {
      $("#head-said").textContent = found.error.message;
    }
  } catch {
    $("#head-said").textContent = t("gone");
  }
}

// ---- start ----

$("#enter").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  key = $("#key").value;
  try {
    sessionStorage.setItem("polyhead-key", key);
  } catch {
    // The key then lasts as long as the page.
  }
  refresh();
});
$("#ask-head").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  lookAt();
});
$("#layer").addEventListener("change", countHeads);
$("#close").addEventListener("click", closeHeads);
$("#theme").addEventListener("click", () => {
  const chosen = document.documentElement.dataset.theme;
  const dark = chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("polyhead-theme", document.documentElement.dataset.theme);
  } catch {
    // The choice then lasts as long as the page.
  }
});
startLanguage(show);

async function forever() {
  for (;;) {
    if (!document.hidden && $("#enter").hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}
forever();

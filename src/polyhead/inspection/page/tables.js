// Three tables of numbers: all heads by their statistics, the chosen head's own numbers with their
// ranks, and one row of its weights in full, to sort and to copy.

// ---- all heads ----

function drawHeadsHead() {
  const cells = [element("th", { scope: "col", text: t("column_head") })];
  measures.forEach((measure, index) => {
    const sorted = index === state.measure;
    const button = element("button", {
      type: "button", title: measure.help,
      data: `sort-${index}`,
    }, [
      element("span", { text: measure.name }),
      element("i", { text: sorted ? (state.descending ? "↓" : "↑") : "", "aria-hidden": "true" }),
    ]);
    button.addEventListener("click", () => sortBy(index));
    cells.push(element("th", {
      scope: "col",
      "aria-sort": sorted ? (state.descending ? "descending" : "ascending") : "none",
    }, [button]));
  });
  const focused = $("#heads-head").contains(document.activeElement)
    ? document.activeElement.dataset.testid : null;
  $("#heads-head").replaceChildren(...cells);
  if (focused) $(`[data-testid="${focused}"]`).focus();
}

function sortBy(index) {
  set(index === state.measure ? { descending: !state.descending }
    : { measure: index, descending: true });
}

function drawHeadsBody() {
  if (state.view !== "table") return;
  const [low, high] = extent(state.measure);
  $("#heads-body").replaceChildren(...ranked().map(({ layer, head, value }) => {
    const name = headName(layer, head);
    const row = element("tr", { data: `row-${name}` }, [
      element("th", { scope: "row" }, [element("a", { href: `#${layer}.${head}`, "data-head": name, text: name })]),
      ...measures.map((measure, index) => {
        const cell = element("td", { text: short(measure.at({ layer, head })) });
        if (index === state.measure && value !== null) {
          cell.classList.add("sorted");
          cell.style.setProperty("--share", `${(100 * (value - low)) / (high - low)}%`);
        }
        return cell;
      }),
    ]);
    row.classList.toggle("chosen", layer === state.layer && head === state.head && state.open);
    return row;
  }));
}

function drawMeasureChoice() {
  const select = $("#measure");
  select.replaceChildren(...measures.map((measure, index) =>
    element("option", { text: measure.name, value: String(index) })));
  select.value = String(state.measure);
  select.title = measures[state.measure].help;
  const button = $("#direction");
  button.textContent = state.descending ? "↓" : "↑";
  button.setAttribute("aria-label", state.descending
    ? t("largest_first") : t("smallest_first"));
}

// ---- the chosen head ----

function drawPanelTop() {
  const { layer, head } = state;
  const chosen = layer >= 0;
  $("#panel-title").textContent = chosen ? t("head", { name: headName(layer, head) }) : t("reading");
  const groups = chosen ? page.kvHeads[layer] : HEADS;
  const width = HEADS / groups;
  const first = Math.floor(head / width) * width;
  $("#panel-note").textContent = groups === HEADS ? ""
    : t("shared_kv", {
      kv: kvHead(layer, head),
      heads: width === 2 ? t("one_head", { head: first + (head === first ? 1 : 0) })
        : t("some_heads", { first, last: first + width - 1 }),
    });
  $("#heatmap").setAttribute("aria-label", chosen
    ? t("weights_of", { name: headName(layer, head) }) : "");
}

function drawNumbers() {
  if (state.layer < 0 || !isRead()) return;
  const { layer, head } = state;
  $("#numbers").replaceChildren(...measures.map((measure, index) => {
    const value = measure.at({ layer, head });
    const rank = 1 + ranked(index, true)
      .findIndex((other) => other.layer === layer && other.head === head);
    return element("div", { title: measure.help }, [
      element("dt", { text: measure.name }),
      element("dd", {}, [
        element("span", { text: short(value), data: `number-${index}` }),
        element("small", { text: value === null ? "" : `#${rank}`, "aria-label": t("rank_only", { rank }) }),
      ]),
    ]);
  }));
}

// ---- one row in full ----

const row = { by: "key", descending: false };

function rowWeights() {
  const { layer, head, query } = state;
  if (layer < 0 || query < 0 || !packed[layer]) return [];
  return tokens.map((token, key) => ({ key, token, weight: weight(layer, head, query, key) }));
}

function drawRow() {
  if (!state.open) return;
  const columns = ["key", "token", "weight"].map((name) => [name, t(`column_${name}`)]);
  const focused = $("#row-head").contains(document.activeElement)
    ? document.activeElement.dataset.testid : null;
  $("#row-head").replaceChildren(...columns.map(([name, title]) => {
    if (name === "token") return element("th", { scope: "col", text: title });
    const sorted = row.by === name;
    const button = element("button", { type: "button", data: `row-sort-${name}` }, [
      element("span", { text: title }),
      element("i", { text: sorted ? (row.descending ? "↓" : "↑") : "", "aria-hidden": "true" }),
    ]);
    button.addEventListener("click", () => {
      Object.assign(row, sorted ? { descending: !row.descending }
        : { by: name, descending: name === "weight" });
      drawRow();
    });
    return element("th", {
      scope: "col", "aria-sort": sorted ? (row.descending ? "descending" : "ascending") : "none",
    }, [button]);
  }));
  if (focused) $(`[data-testid="${focused}"]`)?.focus();

  const all = rowWeights();
  const sum = all.reduce((total, { weight: value }) => total + value, 0);
  $("#exact-title").textContent = TOKENS
    ? t("row_of", { token: visible(state.query), index: state.query }) : t("no_tokens");
  $("#exact-title").title = t("row_sum", { sum: sum.toPrecision(7) });
  const sign = row.descending ? -1 : 1;
  all.sort((a, b) => sign * (a[row.by] - b[row.by]) || a.key - b.key);
  $("#row-body").replaceChildren(...all.map(({ key, token, weight: value }) => {
    const cells = element("tr", { data: `exact-${key}` }, [
      element("td", { text: String(key) }),
      element("td", {}, [element("bdi", { text: visible(key) })]),
      element("td", { classes: "sorted", text: exact(value) }),
    ]);
    cells.lastElementChild.style.setProperty("--share", `${100 * Math.min(1, value)}%`);
    cells.classList.toggle("unlit", page.triangle && key > state.query);
    cells.classList.toggle("chosen", key === state.key);
    return cells;
  }));
}

function rowAsCsv() {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
  const { layer, head, query } = state;
  const lines = rowWeights().map(({ key, token, weight: value }) =>
    [layer, head, query, quoted(tokens[query]), key, quoted(token), exact(value)].join(","));
  return ["layer,head,query,query_token,key,key_token,weight", ...lines].join("\n") + "\n";
}

function rowAsJson() {
  const { layer, head, query } = state;
  return JSON.stringify({
    model: page.model, text: page.title, layer, head,
    query: { index: query, token: tokens[query] },
    weights: rowWeights().map(({ weight: value, ...rest }) => (
      { ...rest, weight: Number(exact(value)) })),
  }, null, 1);
}

async function copy(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", { classes: "unseen", readonly: "" });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand("copy");
    area.remove();
    button.focus();
  }
  const before = button.textContent;
  button.textContent = t(done ? "copied" : "failed");
  button.disabled = true;
  setTimeout(() => {
    button.textContent = before;
    button.disabled = false;
  }, 1200);
}

function startTables() {
  $("#measure").addEventListener("change", (event) => set({
    measure: Number(event.target.value), descending: true,
  }));
  $("#direction").addEventListener("click", () => set({ descending: !state.descending }));
  $("#heads-body").addEventListener("click", (event) => {
    const link = event.target.closest("tr")?.querySelector("a");
    if (link && event.target !== link) link.click();
  });
  $("#copy-csv").addEventListener("click", (event) => copy(rowAsCsv(), event.currentTarget));
  $("#copy-json").addEventListener("click", (event) => copy(rowAsJson(), event.currentTarget));
  drawHeadsHead();
  drawMeasureChoice();
}

on(["measure", "descending", "query", "key"], drawHeadsHead);
on(["measure", "descending", "query", "key", "view", "layersRead", "layer", "head", "open"],
  drawHeadsBody);
on(["measure", "descending", "query", "key"], drawMeasureChoice);
on(["layer", "head"], drawPanelTop);
on(["layer", "head", "query", "key", "layersRead"], drawNumbers);
on(["layer", "head", "open", "query", "key", "layersRead"], drawRow);

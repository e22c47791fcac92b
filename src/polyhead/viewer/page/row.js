// One query's weights in full, to sort and to copy.

const MOST_ROWS = 256; // of more keys the largest weights are shown

const row = {
  by: "key", descending: false,
  weights: /** @type {Float32Array | null} */ (null), of: "", // what the table shows
};

function rowWeights(weights = knownRow()) {
  const { layer } = state;
  if (!look.has(layer, state.head)) return [];
  const first = look.layers[layer].keys[0];
  return weights ? Array.from(weights, (weight, i) => ({ key: first + i, token: look.tokens[first + i], weight })) : [];
}

const knownRow = () => (look.has(state.layer, state.head) ? look.row(state.layer, state.head, state.query) : null);

function drawRowHead() {
  const focused = focusedIn($("#row-head"))?.dataset.testid;
  const columns = ["key", "token", "weight"].map((name) => [name, told(`column_${name}`, name)]);
  $("#row-head").replaceChildren(...columns.map(([name, title]) => {
    if (name === "token") return element("th", { scope: "col", text: title });
    const isSorted = row.by === name;
    const button = element("button", { type: "button", data: `row-sort-${name}` }, [
      element("span", { text: title }),
      element("i", { text: isSorted ? (row.descending ? "↓" : "↑") : "", "aria-hidden": "true" }),
    ]);
    button.addEventListener("click", () => {
      Object.assign(row, isSorted ? { descending: !row.descending }
        : { by: name, descending: name === "weight" });
      drawRow();
    });
    return element("th", {
      scope: "col", "aria-sort": isSorted ? (row.descending ? "descending" : "ascending") : "none",
    }, [button]);
  }));
  if (focused) $(`[data-testid="${focused}"]`)?.focus();
}

function drawRow() {
  if (!state.open) return;
  const weights = knownRow();
  // Other answers arrive for the same row; hundreds of table rows take longer to make than to keep.
  const of = [state.look, state.layer, state.head, state.query, state.key, row.by, row.descending, language].join();
  if (weights && weights === row.weights && of === row.of) return;
  Object.assign(row, { weights, of });
  drawRowHead();
  let all = rowWeights(weights);
  const sum = all.reduce((total, { weight }) => total + weight, 0);
  $("#exact-title").textContent = look.length
    ? t("row_of", { token: visible(state.query), index: state.query }) : t("no_tokens");
  $("#exact-title").title = t("row_sum", { sum: sum.toPrecision(7) });
  $("#exact-note").textContent = all.length > MOST_ROWS ? t("row_largest", { count: MOST_ROWS, all: all.length }) : "";
  if (all.length > MOST_ROWS) all = all.sort((a, b) => b.weight - a.weight).slice(0, MOST_ROWS);
  const sign = row.descending ? -1 : 1;
  all.sort((a, b) => sign * (a[row.by] - b[row.by]) || a.key - b.key);
  const causal = state.layer >= 0 && look.layers[state.layer].triangle;
  $("#row-body").replaceChildren(...all.map(({ key, weight }) => {
    const cells = element("tr", { data: `exact-${key}` }, [
      element("td", { text: String(key) }),
      element("td", {}, [element("bdi", { text: visible(key) })]),
      withBar(element("td", { classes: "sorted", text: exact(weight) }), weight),
    ]);
    cells.classList.toggle("unlit", causal && key > state.query);
    cells.classList.toggle("chosen", key === state.key);
    return cells;
  }));
}

function rowAsCsv() {
  const quoted = (text) => `"${text.replaceAll('"', '""')}"`;
  const { layer, head, query } = state;
  const lines = rowWeights().map(({ key, token, weight }) =>
    [layer, head, query, quoted(look.tokens[query]), key, quoted(token), exact(weight)].join(","));
  return ["layer,head,query,query_token,key,key_token,weight", ...lines].join("\n") + "\n";
}

function rowAsJson() {
  const { layer, head, query } = state;
  return JSON.stringify({
    model: look.model, text: look.title, layer, head,
    query: { index: query, token: look.tokens[query] },
    weights: rowWeights().map(({ weight, ...rest }) => ({ ...rest, weight: Number(exact(weight)) })),
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
  button.textContent = done ? t("copied") : t("failed");
  button.disabled = true;
  setTimeout(() => {
    button.textContent = before;
    button.disabled = false;
  }, 1200);
}

function startRow() {
  $("#copy-csv").addEventListener("click", (event) => copy(rowAsCsv(), event.currentTarget));
  $("#copy-json").addEventListener("click", (event) => copy(rowAsJson(), event.currentTarget));
}

on(["layer", "head", "open", "query", "key", "rows", "parts", "look"], drawRow);

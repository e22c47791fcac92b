// All heads by their statistics, and the chosen head's own numbers with their ranks.

function drawHeadsHead() {
  const cells = [element("th", { scope: "col", text: t("column_head") })];
  measures.forEach((measure, index) => {
    const isSorted = index === state.measure;
    const button = element("button", {
      type: "button", title: measure.help,
      data: `sort-${index}`,
    }, [
      element("span", { text: measure.name }),
      element("i", { text: isSorted ? (state.descending ? "↓" : "↑") : "", "aria-hidden": "true" }),
    ]);
    button.addEventListener("click", () => sortBy(index));
    cells.push(element("th", {
      scope: "col",
      "aria-sort": isSorted ? (state.descending ? "descending" : "ascending") : "none",
    }, [button]));
  });
  const focused = focusedIn($("#heads-head"))?.dataset.testid;
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
  $("#heads-body").replaceChildren(...ranked().map((at) => {
    const { layer, head, value } = at;
    const name = headName(layer, head);
    const row = element("tr", { data: `row-${name}` }, [
      element("th", { scope: "row" }, [element("a", { href: `#${layer}.${head}`, "data-head": name, text: name })]),
      ...measures.map((measure, index) => {
        const cell = element("td", { text: short(measure.at(at)) });
        if (index === state.measure && value !== null) {
          cell.classList.add("sorted");
          withBar(cell, (value - low) / (high - low));
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
  button.setAttribute("aria-label", state.descending ? t("largest_first") : t("smallest_first"));
}

// ---- the chosen head ----

function drawPanelTop() {
  const { layer, head } = state;
  const chosen = look.has(layer, head);
  $("#panel-title").textContent = chosen ? t("head", { name: headName(layer, head) }) : t("reading");
  $("#panel-note").textContent = chosen && look.sharesKeys(layer) ? sharedKeys(layer, head) : "";
  for (const map of bothMaps) {
    map.canvas.setAttribute("aria-label", chosen ? t("weights_of", { name: headName(layer, head) }) : "");
  }
}

// "shares kv head 1 with heads 3–5"
function sharedKeys(layer, head) {
  const { heads, kvHeads } = look.layers[layer];
  const width = heads / kvHeads;
  const first = Math.floor(head / width) * width;
  const others = width === 2 ? t("one_head", { head: first + (head === first ? 1 : 0) })
    : t("some_heads", { first, last: first + width - 1 });
  return t("shared_kv", { kv: look.kvHead(layer, head), heads: others });
}

function drawNumbers() {
  const { layer, head } = state;
  if (!look.has(layer, head)) return;
  const at = { layer, head, index: look.index(layer, head) };
  $("#numbers").replaceChildren(...measures.map((measure, index) => {
    const value = measure.at(at);
    const rank = rankOf(index, at);
    const unit = measure.unit && measure.unit !== "share" ? told(`unit.${measure.unit}`, measure.unit) : "";
    const other = measure.key && beside?.statistics[layer]?.[measure.key]?.[head];
    return element("div", { title: measure.help }, [
      element("dt", { text: measure.name }),
      element("dd", {}, [
        element("span", { text: short(value), data: `number-${index}` }),
        ...(unit ? [element("small", { text: unit })] : []),
        ...(typeof other === "number" ? [element("small", { text: `| ${short(other)}`, data: `number-${index}-b` })] : []),
        element("small", { text: value === null ? "" : `#${rank}`, title: t("rank_only", { rank }) }),
      ]),
    ]);
  }));
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
}

on(["measure", "descending", "query", "key", "look"], drawHeadsHead);
on(["measure", "descending", "query", "key", "view", "pairs", "measured", "layer", "head", "open", "layers", "least", "look"],
  drawHeadsBody);
on(["measure", "descending", "query", "key", "look"], drawMeasureChoice);
on(["layer", "head", "look"], drawPanelTop);
on(["layer", "head", "query", "key", "pairs", "measured", "look"], drawNumbers);

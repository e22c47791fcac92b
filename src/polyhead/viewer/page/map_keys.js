// Moving among the small maps: arrow keys, pointer, what they say.

function moveCursor(cell, focus = true) {
  maps.cells.get(maps.cursor)?.setAttribute("tabindex", "-1");
  const { layer, head } = place(cell);
  maps.cursor = headName(layer, head);
  cell.setAttribute("tabindex", "0");
  if (focus) {
    cell.focus({ preventScroll: true });
    cell.scrollIntoView({ block: "nearest" });
  }
}

// The nearest map above or below, by what is on the screen, so that wrapped rows work too.
function verticalNeighbour(cell, down) {
  const from = cell.getBoundingClientRect();
  const centre = from.left + from.width / 2;
  let best = null;
  let bestCost = Infinity;
  for (const other of maps.box.querySelectorAll(".head")) {
    const to = other.getBoundingClientRect();
    const gap = down ? to.top - from.bottom : from.top - to.bottom;
    if (gap < -1) continue;
    const cost = gap * 1e4 + Math.abs(to.left + to.width / 2 - centre);
    if (cost < bestCost) [best, bestCost] = [other, cost];
  }
  return best;
}

function onMapsKey(event) {
  const cell = event.target.closest(".head");
  if (!cell || event.altKey || event.metaKey) return;
  const row = [...cell.closest(".layer").querySelectorAll(".head")];
  const all = event.ctrlKey || event.key.startsWith("Arrow")
    ? [...maps.box.querySelectorAll(".head")] : row;
  const here = all.indexOf(cell);
  const goals = {
    ArrowRight: () => all[here + 1], ArrowLeft: () => all[here - 1],
    ArrowDown: () => verticalNeighbour(cell, true), ArrowUp: () => verticalNeighbour(cell, false),
    Home: () => all[0], End: () => all.at(-1),
  };
  if (event.key in goals) {
    event.preventDefault();
    const goal = goals[event.key]();
    if (goal) moveCursor(goal);
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    const { layer, head } = place(cell);
    openHead(layer, head);
    $("#heatmap").focus({ preventScroll: true });
  }
}

function startMaps() {
  new ResizeObserver(sizeMaps).observe(maps.box);
  maps.box.addEventListener("keydown", onMapsKey);
  maps.box.addEventListener("click", (event) => {
    const cell = event.target.closest(".head");
    if (!cell) return;
    moveCursor(cell);
    openHead(Number(cell.dataset.layer), Number(cell.dataset.head));
  });
  maps.box.addEventListener("pointermove", (event) => {
    const cell = event.target.closest(".head");
    if (!cell || event.pointerType === "touch") return hideTip();
    const at = place(cell);
    const measure = measures[state.measure];
    const value = measure.at({ ...at, index: look.index(at.layer, at.head) });
    showTip(event.clientX, event.clientY, [
      `${t("head", { name: headName(at.layer, at.head) })}${spokenKv(at)}`, `${measure.name}  ${short(value)}`,
    ]);
  });
  maps.box.addEventListener("pointerleave", hideTip);
  for (const name of ["layers", "least"]) {
    $(`#${name}`).addEventListener("input", (event) => set({ [name]: event.target.value }));
  }
}

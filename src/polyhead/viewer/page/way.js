// The way of a token through the layers: how much attention and network add to its residual stream,
// and the token that the model would name if it ended after each layer.

const WAY_COLOURS = { attention: "of-0", cross_attention: "of-2", feed_forward: "of-1" };

function drawWay() {
  if (!state.open) return;
  const found = look.way(state.query);
  $("#way-title").textContent = look.length ? t("way_title", { token: visible(state.query), index: state.query }) : "";
  $("#way-view").hidden = !found;
  $("#way-missing").textContent = found ? "" : wayMissing();
  $("#way-missing").hidden = Boolean(found);
  if (!found) return;
  const { sizes, guesses } = found;
  const parts = Object.keys(WAY_COLOURS).filter((name) => sizes[name]);
  drawSizes($("#way-picture"), sizes, parts);
  $("#way-note").textContent = guesses ? wayNote() : t("way_unguessed");
  const columns = [
    t("way_layer"), ...parts.map((name) => told(`way_${name}`, name)), t("way_stream"),
    ...(guesses ? [t("way_guess")] : []),
  ];
  const others = guesses ? [element("th", { scope: "col", classes: "others", text: t("way_others") })] : [];
  $("#way-head").replaceChildren(...columns.map((text) => element("th", { scope: "col", text })), ...others);
  const count = sizes.stream.length;
  const rows = Array.from({ length: count + 1 }, (_, i) => i - 1); // −1: before the first layer
  $("#way-body").replaceChildren(...rows.map((layer) => element("tr", { data: `way-${layer}` }, [
    element("th", { scope: "row", text: layer < 0 ? t("way_before") : String(layer) }),
    ...parts.map((name) => element("td", { text: layer < 0 ? "" : short(sizes[name][layer]) })),
    element("td", { text: layer < 0 ? "" : short(sizes.stream[layer]) }),
    ...(guesses ? guessCells(guesses[layer + 1]) : []),
  ])));
}

function wayMissing() {
  if (state.query < look.own) return t("way_encoder");
  return look.source.header.way === null ? t("way_left_out") : "…";
}

const wayNote = () => (look.kind === "encoder" ? t("way_note_encoder") : t("way_note"));

function guessCells(likely) {
  const [[token, share], ...others] = likely;
  const best = withBar(
    element("td", { classes: "sorted guess" }, [element("bdi", { text: token }), element("small", { text: share.toFixed(3) })]), share);
  return [best, element("td", { classes: "others" }, others.flatMap(([name, part]) => [
    element("bdi", { text: name }), element("small", { text: ` ${part.toFixed(3)}  ` }),
  ]))];
}

// Bars for what each part adds, a line for the stream behind the layer.
function drawSizes(box, sizes, parts) {
  const width = pictureWidth(720);
  const count = sizes.stream.length;
  const [left, bottom, high] = [44, 120, 104];
  const most = Math.max(...sizes.stream, ...parts.flatMap((name) => sizes[name]), 1e-9);
  const each = (width - left - 6) / count;
  const wide = Math.max(0.8, (each * 0.8) / parts.length);
  const y = (value) => bottom - (value / most) * high;
  const nodes = [];
  parts.forEach((name, number) => sizes[name].forEach((value, layer) => {
    const bar = svg("rect", {
      x: (left + layer * each + each * 0.1 + number * wide).toFixed(2), y: y(value).toFixed(2),
      width: wide.toFixed(2), height: (bottom - y(value)).toFixed(2), class: WAY_COLOURS[name],
    });
    bar.append(svg("title", {}, `${told(`way_${name}`, name)}, ${t("layer", { layer })}: ${short(value)}`));
    nodes.push(bar);
  }));
  const points = sizes.stream.map((value, layer) => `${(left + (layer + 0.5) * each).toFixed(1)},${y(value).toFixed(1)}`);
  nodes.push(svg("polyline", { points: points.join(" "), class: "stream" }));
  nodes.push(svg("line", { x1: left, x2: width - 6, y1: bottom, y2: bottom, class: "axis" }));
  for (const value of [0, most]) nodes.push(svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value ? short(value) : "0"));
  const every = Math.ceil(count / 15);
  for (let layer = 0; layer < count; layer += every) {
    nodes.push(svg("text", { x: left + (layer + 0.5) * each, y: bottom + 14, "text-anchor": "middle" }, String(layer)));
  }
  box.setAttribute("viewBox", `0 0 ${width} 140`);
  box.setAttribute("aria-label", t("way_picture", { count }));
  box.replaceChildren(...nodes);
  $("#way-legend").replaceChildren(...[...parts, "stream"].map((name) => element("span", {}, [
    element("i", { classes: WAY_COLOURS[name] ?? "of-stream", "aria-hidden": "true" }), told(`way_${name}`, name),
  ])));
}

on(["open", "query", "ways", "look"], drawWay);

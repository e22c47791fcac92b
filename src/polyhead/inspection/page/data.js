// What the page was given: the header (JSON) and the weights, inflated layer by layer.

const page = JSON.parse($("#page-data").textContent);
const { tokens, layers: LAYERS, heads: HEADS } = page;
const TOKENS = tokens.length;

const packed = new Array(LAYERS);

// Every float16 as a number: sign, 5 bits of exponent, 10 bits of mantissa.
const halves = page.half ? Float32Array.from({ length: 65536 }, (_, bits) => {
  const exponent = (bits >> 10) & 31;
  const mantissa = bits & 1023;
  const size = exponent ? (1 + mantissa / 1024) * 2 ** (exponent - 15) : mantissa * 2 ** -24;
  return bits >> 15 ? -size : size;
}) : null;

function weight(layer, head, query, key) {
  if (page.triangle && key > query) return 0;
  const place = page.triangle
    ? (head * TOKENS * (TOKENS + 1)) / 2 + (query * (query + 1)) / 2 + key
    : (head * TOKENS + query) * TOKENS + key;
  const value = packed[layer][place];
  return halves ? halves[value] : value;
}

async function inflate(base64) {
  const bytes = Uint8Array.fromBase64
    ? Uint8Array.fromBase64(base64)
    : Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const buffer = await new Response(stream).arrayBuffer();
  return halves ? new Uint16Array(buffer) : new Float32Array(buffer);
}

// Inflates every layer in turn and tells `arrived(layer)`; the text of a layer is dropped once read.
async function readWeights(arrived) {
  if (!("DecompressionStream" in window)) {
    throw new Error(t("too_old"));
  }
  const perHead = page.triangle ? (TOKENS * (TOKENS + 1)) / 2 : TOKENS * TOKENS;
  for (let layer = 0; layer < LAYERS; layer++) {
    const element = document.getElementById(`weights-${layer}`);
    let values = null;
    try {
      values = await inflate(element.textContent);
    } catch {
      // Reported below, together with a layer that is missing or too short.
    }
    if (values?.length !== HEADS * perHead) {
      throw new Error(t("damaged", { layer }));
    }
    packed[layer] = values;
    element.remove();
    arrived(layer);
  }
}

function kvHead(layer, head) {
  return Math.floor(head / (HEADS / page.kvHeads[layer]));
}

// Layers have names where they are not all of one kind: [short, long].
const layerShort = (layer) => page.layerNames?.[layer][0] ?? String(layer);
const layerName = (layer) => page.layerNames?.[layer][1] ?? t("layer", { layer });

const headName = (layer, head) => `${layerShort(layer)}.${head}`;

// A token with signs for all that cannot be seen, and the same without its leading space, for axes.
const visible = (index) => page.shown[index];
const label = (index) => page.labels[index];

// Words from right to left do not turn the line around them.
const apart = (text) => (/[\p{Script=Arabic}\p{Script=Hebrew}\p{Script=Syriac}]/u.test(text) ? `\u2068${text}\u2069` : text);

// ---- numbers as people read them ----

// The fewest digits that name this float32 and no other.
function exact(value) {
  for (let digits = 1; digits < 10; digits++) {
    const text = value.toPrecision(digits);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(value);
}

function short(value) {
  if (value === null || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.001) return value.toExponential(1).replace("e-", "e−");
  return value.toFixed(size < 10 ? 3 : size < 100 ? 2 : 1);
}

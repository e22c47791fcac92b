// Numbers that stand in the file: base64 of gzip of little-endian numbers.

// Every float16 as a number: sign, 5 bits of exponent, 10 bits of mantissa.
/** @type {Float32Array | null} */
let halfTable = null;

function halves() {
  halfTable ??= Float32Array.from({ length: 65536 }, (_, bits) => {
    const exponent = (bits >> 10) & 31;
    const mantissa = bits & 1023;
    const size = exponent ? (1 + mantissa / 1024) * 2 ** (exponent - 15) : mantissa * 2 ** -24;
    return bits >> 15 ? -size : size;
  });
  return halfTable;
}

// The bytes of a block, which is dropped once read; null where it is missing or damaged.
/** @param {string} name */
async function unpacked(name) {
  const block = document.getElementById(name);
  if (!block) return null;
  const base64 = block.textContent;
  block.remove();
  try {
    const bytes = Uint8Array.fromBase64
      ? Uint8Array.fromBase64(base64)
      : Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return await new Response(stream).arrayBuffer();
  } catch {
    return null; // the reader says which layer it was
  }
}

// The lesson's arithmetic. Tests compare every function with polyhead.

const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
const transpose = (a) => a[0].map((_, j) => a.map((row) => row[j]));
const matmul = (a, b) => {
  const columns = transpose(b);
  return a.map((row) => columns.map((column) => sum(row.map((x, k) => x * column[k]))));
};

// A row of which nothing is visible (all −∞) has weights 0.
function softmax(row) {
  const most = Math.max(...row);
  if (most === -Infinity) return row.map(() => 0);
  const powers = row.map((x) => Math.exp(x - most));
  const total = sum(powers);
  return powers.map((x) => x / total);
}

// softmax(mask(q kᵀ · scale)) v; `visible(query, key)` says where a query may look.
/** @type {(q: number[][], k: number[][], v: number[][], options?: { scale?: number, visible?: (query: number, key: number) => boolean }) => { scores: number[][], weights: number[][], out: number[][] }} */
function attend(q, k, v, { scale = 1 / Math.sqrt(q[0].length), visible = () => true } = {}) {
  const scores = matmul(q, transpose(k))
    .map((row, i) => row.map((x, j) => (visible(i, j) ? x * scale : -Infinity)));
  const weights = scores.map(softmax);
  return { scores, weights, out: matmul(weights, v) };
}

const entropy = (row) => -sum(row.map((p) => (p > 0 ? p * Math.log(p) : 0)));

// Which keys a query may see; positions count from 0, `n` is the number that the reader sets.
const MASKS = {
  none: () => true,
  causal: (query, key) => key <= query,
  window: (query, key, n) => key <= query && key > query - n,
  prefix: (query, key, n) => key < n || key <= query,
  documents: (query, key, n) => key <= query && (query < n) === (key < n),
  padding: (query, key, n) => key < n,
};

// Softmax and weighted sum of a row, tile by tile: the running maximum m, the sum l of exp(x − m),
// and the sum o of exp(x − m) · v. The row's output is o / l after the last tile.
function online(scores, values, size) {
  let [m, l, o] = [-Infinity, 0, 0];
  const states = [];
  for (let start = 0; start < scores.length; start += size) {
    const part = scores.slice(start, start + size);
    const most = Math.max(m, ...part);
    const shrink = Math.exp(m - most);
    const powers = part.map((x) => Math.exp(x - most));
    l = l * shrink + sum(powers);
    o = o * shrink + sum(powers.map((p, i) => p * values[start + i]));
    m = most;
    states.push({ m, l, o, shrink });
  }
  return states;
}

// The tiles that are computed, row by row; causal masks empty those above the diagonal.
function tiles({ tokens, side, causal }) {
  const count = Math.ceil(tokens / side);
  return Array.from({ length: count }, (_, row) =>
    Array.from({ length: causal ? row + 1 : count }, (_, column) => ({ row, column }))).flat();
}

// Bytes between slow and fast memory for one head: whole matrices, or tiles of `side` tokens.
function traffic({ tokens, size, side, bytes, causal }) {
  const matrix = tokens * size * bytes;
  const scores = tokens * tokens * bytes;
  const length = (block) => Math.min(side, tokens - block * side);
  const visited = tiles({ tokens, side, causal });
  return {
    whole: 4 * matrix + 4 * scores, // read Q, K; write S; read S; write P; read P, V; write O
    tiled: 2 * matrix + sum(visited.map(({ column }) => 2 * length(column) * size * bytes)),
    held: bytes * (4 * side * size + side * side), // Q, K, V, O and the scores of one tile
    scores,
  };
}

// The data of the page, for the check of types (tests/types): nothing of this is in the page itself.

type Run = [start: number, stop: number]; // among the look's tokens

interface Layer {
  part: "layer" | "encoder" | "decoder" | "cross";
  number: number; // in that part
  heads: number;
  kvHeads: number;
  shares: boolean; // its heads have no softmax: weights are shares
  queries: Run;
  keys: Run;
  triangle: boolean; // no weight lies above the diagonal
  size?: number; // of a query, where a file holds queries and keys
  scale?: number;
  softcap?: number | null;
}

type Scored = [layer: number, head: number, score: number];

interface NotablePair {
  head: [layer: number, head: number];
  query: number;
  key: number;
  weight: number;
  times: number; // what the distance predicts
  near: number; // the head's mean weight at that distance
  shuffled: number | null; // between the same tokens in shuffles of the text
  others: number; // of the other tokens on the key
}

type Habit = [
  kind: string | null, nearest: string, share: number | null, even: number | null, shuffled: number | null, distance: number,
];

interface Notable {
  alignment?: Scored[]; // of an encoder-decoder
  pairs?: NotablePair[];
  more?: boolean; // whether more weights stand out than in shuffled text
  habits?: Habit[][]; // by layer and head
}

interface NextToken {
  tokens: [piece: string, logit: number][]; // the likeliest first
  partitions: number[]; // log Σ exp(logit / t) over the vocabulary, at each of the look's temperatures
}

interface Way {
  sizes: Record<string, number[]>; // by part and "stream": a number for each layer
  guesses: [piece: string, share: number][][] | null; // before the first layer, and after each
}

type Numbers = Record<string, (number | null)[]>; // by statistic: a number for each head of a layer

interface LookHeader {
  model: string;
  kind: "decoder" | "encoder" | "encoder-decoder";
  title: string;
  continuation: string;
  tokens: string[];
  shown: string[];
  labels: string[];
  layers: Layer[];
  next: NextToken | null;
  temperatures: number[];
  own: number; // the first token that the model's own layers read
  focus?: [query: number, key: number] | null;
  notable?: Notable | null;
  facts?: [name: string, value: string][];
  statistics?: Record<string, (number | null)[][]>; // of a file: by statistic, layer and head
  way?: Way[] | null;
  // of a file
  block?: number;
  half?: boolean;
  rounded?: boolean;
  vectors?: boolean;
  // of a server
  look?: number;
  seconds?: number;
  bytes?: number;
}

interface FileHeader extends LookHeader { // of a look whose data stand in the file
  block: number; // the first of its blocks
  statistics: Record<string, (number | null)[][]>;
}

interface Rectangle { // weights; a cell is the largest of `cell` × `cell`
  rows: number;
  columns: number;
  cell: number;
  values: Float32Array;
}

interface Ends { q0: number; q1: number; k0: number; k1: number } // counted in the layer

interface Product { q: Float32Array; k: Float32Array; raw: Float32Array; scores: Float32Array }

type Soon<T> = T | Promise<T>; // at once from a file, later from a server

interface Source {
  header: LookHeader;
  gone?: boolean; // another look has taken its place
  read(arrived: (layer: number) => void): Promise<void>;
  isThere(layer: number): boolean;
  weight?(layer: number, head: number, query: number, key: number): number;
  row(layer: number, head: number, query: number): Soon<Float32Array>;
  column(layer: number, head: number, key: number): Soon<Float32Array>;
  part(layer: number, head: number, ends: Ends, pixels: number): Soon<Rectangle>;
  small(layer: number, head: number, hideFirst: boolean): Rectangle | null;
  pair(query: number, key: number): Soon<Float32Array> | null;
  product(layer: number, head: number, query: number, key: number): Soon<Product> | null;
  statistics(layer: number): Soon<Numbers>;
  way(token: number): Soon<Way> | null;
}

interface Look extends Omit<LookHeader, "statistics" | "way"> {}

interface Measure {
  key?: string; // none: the chosen pair's weight
  unit: string;
  readonly name: string;
  readonly help: string;
  at(head: { layer: number; head: number; index: number }): number | null;
}

interface Head { layer: number; head: number; index: number }

interface Window { polyhead: unknown } // what tests may touch

interface Uint8ArrayConstructor { fromBase64?(text: string): Uint8Array<ArrayBuffer> }

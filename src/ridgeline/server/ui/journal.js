// Runs of the engine, step by step: from records of /explain/steps, of a simulation, or of a file of --journal.

const MAGIC = "ridgeline journal 1\n";
const GAP_S = 0.5; // of idle time between two steps that is shown; what is longer is cut
const PARTS = ["plan", "run", "commit", "render"];

export const rowsOf = ({ fields, rows }) => rows.map((row) => Object.fromEntries(fields.map((field, i) => [field, row[i]])));

// What a span computes: one token of an output, drafts to verify, or a part of a prompt.
function kindOf(span) {
  if (span.num_tokens === span.num_rows) return span.num_tokens > 1 ? "verify" : "decode";
  return "prefill";
}

export function runOf(records, name) {
  const spans = rowsOf(records.spans);
  const firstSpan = records.spans.first || 0;
  const decisions = Map.groupBy ? Map.groupBy(rowsOf(records.decisions), (each) => each.step) : grouped(rowsOf(records.decisions));
  const steps = [];
  let shift = 0;
  let end = null;
  for (const row of rowsOf(records.steps)) {
    const duration = PARTS.reduce((sum, part) => sum + (row[`${part}_s`] || 0), 0);
    if (end === null) shift = -row.start_s;
    else if (row.start_s - end > GAP_S) shift -= row.start_s - end - GAP_S;
    end = row.start_s + duration;
    const first = row.first_span - firstSpan;
    if (first < 0) continue; // its spans are gone already
    const step = {
      number: row.step, at: row.start_s + shift, duration, parts: PARTS.map((part) => [part, row[`${part}_s`] || 0]), sample: row.sample_s, batch: row.batch_s,
      tokens: row.num_tokens, spans: [], prefill: 0, decode: 0, verify: 0, waits: records.wait_reasons[row.head_waits] || "", groups: [], admitted: [], preempted: [],
    };
    for (const span of spans.slice(first, first + row.num_spans)) {
      const kind = kindOf(span);
      step[kind] += span.num_tokens;
      step.spans.push({ seq: span.seq_id, start: span.start + row.span_shift, tokens: span.num_tokens, kind });
    }
    for (let group = 0; `used_${group}` in row; group++) step.groups.push([row[`used_${group}`], row[`cached_${group}`], row[`free_${group}`]]);
    for (const each of decisions.get(row.step) || []) {
      if (each.kind === 0) step.admitted.push({ seq: each.seq_id, cached: each.value, reason: records.cache_reasons[each.reason] || "" });
      else step.preempted.push({ seq: each.seq_id, for: each.value });
    }
    steps.push(step);
  }
  const last = steps.at(-1);
  return { name, steps, seconds: last ? last.at + last.duration : 0, most: Math.max(1, ...steps.map((step) => step.tokens)), origin: steps.length ? steps[0].at : 0 };
}

function grouped(rows) {
  const found = new Map();
  for (const row of rows) found.set(row.step, [...(found.get(row.step) || []), row]);
  return found;
}

// The index of the step that is computed at a time, or the last before it.
export function stepAt(run, seconds) {
  let [low, high] = [0, run.steps.length - 1];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (run.steps[middle].at <= seconds) low = middle;
    else high = middle - 1;
  }
  return low;
}

// Records as far as a file has them whole; `cut`: it ends within one.
export function readJournal(buffer, waitReasons) {
  const bytes = new Uint8Array(buffer);
  const view = new DataView(buffer);
  if (new TextDecoder().decode(bytes.subarray(0, MAGIC.length)) !== MAGIC) throw new Error("This is no journal. --journal FILE of a command that runs a model writes one.");
  const rings = {};
  let at = MAGIC.length;
  let setup = null;
  let reasons = [];
  while (at < bytes.length) {
    const length = at + 8 <= bytes.length ? Number(view.getBigUint64(at, true)) : Infinity;
    if (at + 8 + length > bytes.length) break;
    const value = unpack(view, at + 8)[0];
    at += 8 + length;
    if (setup === null) setup = value;
    else {
      const [name, fields, data, cacheReasons] = value;
      reasons = cacheReasons;
      const ring = (rings[name] ??= { first: 0, fields: fields.map(([field]) => field), rows: [] });
      for (const row of rowsFrom(fields, data)) ring.rows.push(row);
    }
  }
  const cut = at < bytes.length;
  if (!rings.steps) throw new Error(cut ? "It was cut off before its first steps." : "The journal holds no steps.");
  const none = { first: 0, fields: [], rows: [] };
  const { steps, spans = none, decisions = none } = rings;
  const [first, count] = ["first_span", "num_spans"].map((name) => steps.fields.indexOf(name));
  steps.rows = steps.rows.filter((row) => row[first] + row[count] <= spans.rows.length);
  return { steps, spans, decisions, cache_reasons: reasons, wait_reasons: waitReasons, setup, cut };
}

const READERS = {
  int64: [8, (view, at) => Number(view.getBigInt64(at, true))],
  int32: [4, (view, at) => view.getInt32(at, true)],
  float64: [8, (view, at) => view.getFloat64(at, true)],
};

function* rowsFrom(fields, data) {
  const readers = fields.map(([, type]) => READERS[type]);
  if (readers.some((reader) => !reader)) throw new Error("The journal has fields of a type that this page does not know.");
  const view = new DataView(data.buffer, data.byteOffset, data.byteLength);
  for (let at = 0; at < data.byteLength; ) {
    const row = [];
    for (const [size, read] of readers) {
      row.push(read(view, at));
      at += size;
    }
    yield row;
  }
}

// MessagePack: a value and where it ends.
function unpack(view, at) {
  const byte = view.getUint8(at++);
  const bytes = (size, begin) => new Uint8Array(view.buffer, view.byteOffset + begin, size);
  const text = (size, begin) => [new TextDecoder().decode(bytes(size, begin)), begin + size];
  const list = (count, begin) => {
    const found = [];
    for (let i = 0; i < count; i++) {
      const [value, end] = unpack(view, begin);
      found.push(value);
      begin = end;
    }
    return [found, begin];
  };
  const map = (count, begin) => {
    const [flat, end] = list(2 * count, begin);
    return [Object.fromEntries(Array.from({ length: count }, (_, i) => [flat[2 * i], flat[2 * i + 1]])), end];
  };
  if (byte < 0x80) return [byte, at];
  if (byte < 0x90) return map(byte & 15, at);
  if (byte < 0xa0) return list(byte & 15, at);
  if (byte < 0xc0) return text(byte & 31, at);
  if (byte >= 0xe0) return [byte - 256, at];
  const sized = { 0xc4: [1, bytesAt], 0xc5: [2, bytesAt], 0xc6: [4, bytesAt], 0xd9: [1, text], 0xda: [2, text], 0xdb: [4, text], 0xdc: [2, list], 0xdd: [4, list], 0xde: [2, map], 0xdf: [4, map] }[byte];
  function bytesAt(size, begin) { return [bytes(size, begin), begin + size]; }
  if (sized) {
    const [width, read] = sized;
    return read(width === 1 ? view.getUint8(at) : width === 2 ? view.getUint16(at) : view.getUint32(at), at + width);
  }
  switch (byte) {
    case 0xc0: return [null, at];
    case 0xc2: return [false, at];
    case 0xc3: return [true, at];
    case 0xca: return [view.getFloat32(at), at + 4];
    case 0xcb: return [view.getFloat64(at), at + 8];
    case 0xcc: return [view.getUint8(at), at + 1];
    case 0xcd: return [view.getUint16(at), at + 2];
    case 0xce: return [view.getUint32(at), at + 4];
    case 0xcf: return [Number(view.getBigUint64(at)), at + 8];
    case 0xd0: return [view.getInt8(at), at + 1];
    case 0xd1: return [view.getInt16(at), at + 2];
    case 0xd2: return [view.getInt32(at), at + 4];
    case 0xd3: return [Number(view.getBigInt64(at)), at + 8];
    default: throw new Error("The journal cannot be read.");
  }
}

// Live: what the engine does now, from /metrics, once a second. Rates and times are of the last seconds, not since the
// start; what has not happened is "–".

import { request } from "./api.js";
import { spark } from "./charts.js";
import { button, h, milliseconds, number, percent, plural } from "./dom.js";

const EVERY_MS = 1000;
const SHOWN = 90; // samples in a chart
const WINDOW = 60; // samples that times of requests are taken from
const RATE = 3; // samples that a rate is taken from

export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const at = line.lastIndexOf(" ");
    const [, name, labels = ""] = /^([^{]*)(?:\{(.*)\})?$/.exec(line.slice(0, at));
    const short = name.replace(/^ridgeline_/, "");
    if (!found.has(short)) found.set(short, []);
    found.get(short).push([Object.fromEntries([...labels.matchAll(/(\w+)="([^"]*)"/g)].map(([, key, value]) => [key, value])), Number(line.slice(at + 1))]);
  }
  return found;
}

const sum = (sample, name) => (sample.get(name) || []).reduce((total, [, value]) => total + value, 0);

// Whether another process or engine counts now, from nothing.
function isAnew(then, now) {
  const [before, after] = [then, now].map((sample) => ["process", "engine_process"].map((name) => sum(sample, `${name}_start_time_seconds`)));
  return String(before) !== String(after) || sum(now, "step_duration_seconds_count") < sum(then, "step_duration_seconds_count");
}

// The share of observations below `q`, between two samples of a histogram, by lines between its bounds; null: none.
export function quantile(first, last, name, q) {
  const before = new Map((first.get(`${name}_bucket`) || []).map(([labels, value]) => [labels.le, value]));
  const buckets = (last.get(`${name}_bucket`) || []).map(([labels, value]) => [labels.le === "+Inf" ? Infinity : Number(labels.le), value - (before.get(labels.le) || 0)]);
  const total = buckets.length ? buckets.at(-1)[1] : 0;
  if (!total) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= q * total) return bound === Infinity ? low : low + ((bound - low) * (q * total - below)) / (count - below || 1);
    [low, below] = [bound, count];
  }
  return low;
}

const TILES = [
  { id: "batch", name: "Batch", filled: true, unit: "sequences", now: (now) => ["running", sum(now, "num_requests_running")], text: number,
    note: (now) => `┄ ${plural(sum(now, "num_requests_waiting"), "sequence")} in the queue`, second: ["waiting", (now) => sum(now, "num_requests_waiting")] },
  { id: "tokens", name: "Generated", filled: true, unit: "tokens/s", rate: "generation_tokens_total", text: number,
    note: (now, then, seconds) => `prompts: ${number((sum(now, "prompt_tokens_total") - sum(then, "prompt_tokens_total")) / seconds)} tokens/s` },
  { id: "kv", name: "KV cache", filled: true, most: 1, now: (now) => ["in use", sum(now, "kv_cache_usage_perc")], text: percent,
    note: (now) => { const of = (state) => (now.get("kv_blocks") || []).reduce((total, [labels, value]) => total + (labels.state === state ? value : 0), 0);
      return `blocks: ${number(of("used"))} used, ${number(of("cached"))} cached, ${number(of("free"))} free`; } },
  { id: "ttft", name: "TTFT", unit: "p50", times: "time_to_first_token_seconds", text: milliseconds },
  { id: "tpot", name: "TPOT", unit: "p50", times: "time_per_output_token_seconds", text: milliseconds },
  { id: "step", name: "Step", filled: true, ratio: ["step_duration_seconds_sum", "step_duration_seconds_count"], scale: 1000, text: milliseconds,
    note: (now, then, seconds) => `${number((sum(now, "step_duration_seconds_count") - sum(then, "step_duration_seconds_count")) / seconds)} steps/s, ${number((sum(now, "step_tokens_sum") - sum(then, "step_tokens_sum")) / seconds)} tokens/s computed` },
  { id: "prefix", name: "Prefix cache", filled: true, most: 1, ratio: ["prefix_cache_hits_total", "prefix_cache_queries_total"], slow: true, text: percent, unit: "of prompt tokens",
    note: (now) => `${number(sum(now, "prefix_cache_hits_total"))} tokens since the start` },
  { id: "accepted", name: "Drafts accepted", filled: true, most: 1, ratio: ["spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"], slow: true, text: percent,
    note: (now) => (sum(now, "spec_decode_num_draft_tokens_total") ? `${number(sum(now, "spec_decode_num_accepted_tokens_total"))} tokens since the start` : "nothing was drafted: see --speculate") },
];

const NONE = "unknown: ridgeline hardware has not measured this machine, or nothing was priced";

// A step's least time by the ceilings, its predicted and its measured time: means of the steps priced lately.
function priced(samples) {
  const [, now] = samples.at(-1);
  const [, then] = samples.at(-1 - Math.min(WINDOW, samples.length - 1));
  const of = (sample, name, label) => (sample.get(`priced_step${name}_total`) || []).map(([labels, value]) => [labels[label], value]);
  const grown = (name, label) => { const before = new Map(of(then, name, label)); return of(now, name, label).map(([key, value]) => [key, value - (before.get(key) || 0)]); };
  const total = (values) => values.reduce((whole, [, value]) => whole + value, 0);
  const steps = total(grown("s"));
  const most = (values) => values.reduce((a, b) => (b[1] > a[1] ? b : a))[0];
  const row = (values, from) => [steps ? milliseconds((1000 * total(values)) / steps) : "–", steps ? from(values) : NONE];
  return [row(grown("_limit_seconds", "bound"), (values) => `measured ceilings; ${most(values)} binds most`), row(grown("_predicted_seconds", "provenance"), most), row(grown("_seconds"), () => `measured: ${plural(steps, "step")}, one a second at most`)];
}

export function live() {
  const samples = [];
  const series = new Map(TILES.map((tile) => [tile.id, [[], []]]));
  const cards = new Map(TILES.map((tile) => [tile.id, card(tile)]));
  const sentence = h("p", { class: "lead", "aria-live": "off" }, "Waiting for two samples.");
  const three = ["limit", "predicted", "measured"].map((name) => [name, h("td", { class: "num strong" }), h("td", { class: "quiet" })]);
  const totals = h("p", { class: "quiet" });
  const table = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Values of the last seconds", hidden: true });
  const toggle = button("As table", () => { table.hidden = !table.hidden; toggle.setAttribute("aria-pressed", String(!table.hidden)); tabulate(); }, { "aria-pressed": "false" });
  const element = h("section", { "aria-labelledby": "live-title" }, h("h1", { id: "live-title" }, "Live"), sentence,
    h("div", { class: "tiles" }, [...cards.values()].map((each) => each.element)), 
    h("article", { class: "box", "aria-label": "A step's three times" }, h("h2", {}, "A step's three times"), h("table", { class: "plain" }, h("tbody", {}, three.map(([name, ...cells]) => h("tr", {}, h("th", { scope: "row" }, name), cells))))),
    h("div", { class: "row" }, toggle, totals), table);

  function tabulate() {
    if (table.hidden) return;
    const count = Math.min(30, series.get("batch")[0].length);
    const rows = Array.from({ length: count }, (_, i) => h("tr", {}, h("th", { scope: "row", class: "num" }, `−${i} s`), TILES.map((tile) => h("td", { class: "num" }, known(tile, series.get(tile.id)[0].at(-1 - i))))));
    table.replaceChildren(h("table", { class: "plain" }, h("thead", {}, h("tr", {}, h("th", {}, ""), TILES.map((tile) => h("th", { scope: "col" }, `${tile.name}${tile.unit ? `, ${tile.unit}` : ""}`)))), h("tbody", {}, rows)));
  }

  async function sample() {
    if (document.hidden) return;
    let now;
    try {
      now = parse(await (await request("metrics")).text());
    } catch {
      return; // the banner says it
    }
    if (samples.length && isAnew(samples.at(-1)[1], now)) samples.length = 0;
    samples.push([performance.now(), now]);
    if (samples.length > SHOWN) samples.shift();
    if (samples.length < 2) return;
    for (const tile of TILES) {
      const [values, seconds] = series.get(tile.id);
      const [value, second] = measured(tile, samples);
      values.push(value);
      seconds.push(second);
      if (values.length > SHOWN) { values.shift(); seconds.shift(); }
      cards.get(tile.id).update(values, seconds, samples);
    }
    const [running, waiting] = [sum(now, "num_requests_running"), sum(now, "num_requests_waiting")];
    const speed = series.get("tokens")[0].at(-1);
    sentence.textContent = running || waiting
      ? `${plural(running, "sequence")} in the batch, ${waiting || "none"} waiting, ${number(speed)} tokens/s.`
      : "Nothing runs. Send a request, or ask something on the Chat page, and watch it here.";
    totals.textContent = `Since the start: ${plural(sum(now, "request_success_total"), "output")}, ${plural(sum(now, "generation_tokens_total"), "token")} generated, ${plural(sum(now, "num_preemptions_total"), "preemption")}, ${sum(now, "requests_rejected_total")} refused, ${sum(now, "requests_aborted_total")} aborted.`;
    priced(samples).forEach((texts, i) => texts.forEach((text, j) => { three[i][j + 1].textContent = text; }));
    tabulate();
  }

  return { element, enter() {
    sample();
    const timer = setInterval(sample, EVERY_MS);
    return () => clearInterval(timer);
  } };
}

const known = (tile, value) => (value === null || value === undefined ? "–" : tile.text(value));

function measured(tile, samples) {
  const now = samples.at(-1)[1];
  if (tile.now) return [tile.now(now)[1], tile.second ? tile.second[1](now) : null];
  const [then_ms, then] = samples.at(-1 - Math.min(tile.times || tile.slow ? WINDOW : RATE, samples.length - 1));
  if (tile.times) return [quantile(then, now, tile.times, 0.5), quantile(then, now, tile.times, 0.95)].map((value) => (value === null ? null : value * 1000));
  const grown = (name) => sum(now, name) - sum(then, name);
  if (tile.rate) return [(grown(tile.rate) * 1000) / (samples.at(-1)[0] - then_ms), null];
  const [part, whole] = tile.ratio.map(grown);
  return [whole ? (part / whole) * (tile.scale || 1) : null, null];
}

function card(tile) {
  const value = h("p", { class: "value" }, "–");
  const note = h("p", { class: "quiet" }, "\u00a0");
  const chart = h("div", { class: "chart" });
  const scale = h("span", { class: "scale", "aria-hidden": "true" });
  return {
    element: h("article", { class: "tile", "aria-label": tile.name }, h("h2", {}, tile.name), value, note, h("div", { class: "plot" }, chart, scale)),
    update(values, seconds, samples) {
      const last = values.at(-1);
      value.replaceChildren(known(tile, last), tile.unit && last !== null ? h("small", {}, ` ${tile.unit}`) : "");
      const [then_ms, then] = samples.at(-1 - Math.min(RATE, samples.length - 1));
      const [now_ms, now] = samples.at(-1);
      note.textContent = tile.note ? tile.note(now, then, (now_ms - then_ms) / 1000) : `┄ p95 ${known(tile, seconds.at(-1))}, of the last ${WINDOW} s`;
      const all = [...values, ...seconds].filter((each) => each !== null);
      const most = tile.most || nice(Math.max(0, ...all));
      scale.textContent = tile.text(most);
      const lines = [[values, tile.filled ? "filled" : "plain"]];
      if (seconds.some((each) => each !== null)) lines.push([seconds, "second"]);
      chart.replaceChildren(spark(lines, { most, seconds: SHOWN, words: `${tile.name} over the last ${values.length} seconds: now ${known(tile, last)}, at most ${all.length ? tile.text(Math.max(...all)) : "–"}` }));
    },
  };
}

function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

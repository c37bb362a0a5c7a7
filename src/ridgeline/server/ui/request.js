// Request: what one request went through, from the queue to its last token, each step beside its limit and prediction.

import { get } from "./api.js";
import { splitBar } from "./charts.js";
import { asTable, command, h, button, milliseconds, number, plural, s } from "./dom.js";
import { rowsOf } from "./journal.js";

const SHOWN = 40; // requests in the list
const SIZE = { width: 640, height: 220, left: 76, bottom: 30, top: 12 };
const KINDS = { queue: "queue", prefill: "prefill", decode: "decode", alone: "decode", "batch-mates": "cached", "others' prefill": "prefill", unexplained: "verify", "between steps": "queue" };
const PRIOR = { prior: "the limit with efficiencies that kernels reach on machines of this class", calibrated: "the limit with efficiencies that were fitted on this machine" };
const WAITS = { slots: "a slot", budget: "tokens of the step's budget", blocks: "blocks of the KV cache", just_preempted: "a sequence that was just preempted", together: "its other sequences" };

export function request() {
  const list = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "The last requests" });
  const card = h("article", { class: "box", "aria-live": "polite", hidden: true });
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const again = button("Look again", () => look());
  const element = h("section", { class: "request", "aria-labelledby": "request-title" }, h("h1", { id: "request-title" }, "Request"),
    h("p", { class: "lead" }, "Where one request's time went: waiting, its prompt, each of its tokens. Choose one."), problem, h("div", { class: "row" }, again), list, card);
  let chosen = null;

  function fail(error) {
    problem.textContent = error ? error.message : "";
    problem.hidden = !error;
  }

  async function look() {
    try {
      const found = await get("explain/steps?steps=-1&spans=-1&decisions=0&outputs=0");
      fail(null);
      const admitted = new Map(rowsOf(found.decisions).filter((each) => each.kind === 0).map((each) => [each.seq_id, found.cache_reasons[each.reason] || ""]));
      const rows = rowsOf(found.outputs).slice(-SHOWN).reverse();
      list.replaceChildren(rows.length ? table(rows, admitted) : h("p", { class: "quiet" }, "No request has ended yet. Ask something on the Chat page, or send one to the API, and look again."));
      if (chosen === null && rows.length) choose(rows[0], admitted.get(rows[0].seq_id));
    } catch (error) {
      fail(error);
    }
  }

  function table(rows, admitted) {
    const cells = (row) => [row.num_prompt, row.num_cached, row.num_output, row.num_preemptions, ...["queue_s", "ttft_s", "latency_s"].map((name) => (row[name] === null ? "–" : milliseconds(1000 * row[name])))];
    return h("table", { class: "plain" }, h("thead", {}, h("tr", {}, ["", "prompt", "cached", "output", "preempted", "queue", "TTFT", "total"].map((name, i) => h("th", { scope: "col", class: i ? "num" : "" }, name || "request")))),
      h("tbody", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row" }, button(`sequence ${row.seq_id}`, () => choose(row, admitted.get(row.seq_id)), { "aria-pressed": String(row.seq_id === chosen), "data-seq": row.seq_id })), cells(row).map((cell) => h("td", { class: "num" }, cell))))));
  }

  async function choose(row, reason = "") {
    chosen = row.seq_id;
    for (const each of list.querySelectorAll("[data-seq]")) each.setAttribute("aria-pressed", String(each.dataset.seq === String(chosen)));
    card.hidden = false;
    card.replaceChildren(h("p", { class: "quiet" }, "The server prices its steps …"));
    try {
      const said = await get(`explain/doctor?request=${row.seq_id}`);
      if (chosen === row.seq_id) card.replaceChildren(...life(row.seq_id, said, reason));
      fail(null);
    } catch (error) {
      card.hidden = true;
      fail(error);
    }
  }

  return { element, enter: () => { look(); } };
}

const bar = (times, name = (each) => each) => splitBar(Object.entries(times).map(([part, value]) => [name(part), value, KINDS[part] || "queue"]), milliseconds);

function life(seq, said, reason) {
  const { found } = said;
  const { tokens, waits, parts } = found;
  const total = Object.values(parts).reduce((sum, value) => sum + value, 0);
  const from = h("p", { class: "quiet" }, `Measured: the times of the steps. Predicted: ${found.provenance}, ${PRIOR[found.provenance] || "the limit with efficiencies on top"}. Limit: from ceilings that were measured on this machine.`);
  const cached = tokens.cached ? `${plural(tokens.cached, "token")} of the prompt came from the prefix cache` : "nothing of the prompt was in the prefix cache";
  const nodes = [h("h2", {}, `Sequence ${seq}`, h("small", { class: "quiet" }, ` ${milliseconds(total)}, ended: ${found.end}`)), h("p", { class: "lead" }, why(found)),
    h("p", {}, `${plural(tokens.prompt, "token")} in, ${tokens.output} out; ${cached}${reason ? ` (${reason})` : ""}; preempted ${plural(tokens.preemptions, "time")}.`),
    h("h3", {}, "From arrival to the last token (measured)"), bar(parts)];
  if (Object.keys(waits).length) nodes.push(h("h3", {}, "What it waited for (measured)"), bar(waits, (name) => WAITS[name] || name));
  if (parts.decode > 0) nodes.push(h("h3", {}, `The time after the first token (${found.provenance}; unexplained and between: measured)`), bar(found.decoding));
  if (found.steps.length) nodes.push(h("h3", {}, "Its steps: limit, predicted, measured"), ladder(found), asTable("Steps", found.head.map((name) => name.replace("_ms", ", ms")), found.steps.map((step) => step.map((cell) => (typeof cell === "number" ? number(cell) : cell)))));
  return [...nodes, from, command(said.command.replace(/\S*recent\.journal/, "run.journal"))];
}

// The largest part in words.
function why({ parts, waits, decoding }) {
  const most = (times) => Object.entries(times).reduce((best, each) => (each[1] > best[1] ? each : best), ["", 0]);
  const [part, value] = most(parts);
  const total = Object.values(parts).reduce((sum, each) => sum + each, 0);
  const [inner, of] = part === "queue" ? most(waits) : part === "decode" ? most(decoding) : ["", 0];
  const words = { queue: "waiting in the queue", prefill: "computing its prompt", decode: "its tokens after the first" }[part];
  const cause = part === "queue" ? `most of it for ${WAITS[inner] || inner}` : `the largest part of it: ${inner}`;
  return `${number((100 * value) / (total || 1))} % of its ${milliseconds(total)} went to ${words}${inner ? `; ${cause}, ${milliseconds(of)}` : ""}.`;
}

// A column for each step on a logarithmic axis: from the limit to what was predicted, and from there to what was measured.
function ladder({ head, steps }) {
  const [kind, low, mid, high] = ["kind", "limit_ms", "predicted_ms", "measured_ms"].map((name) => head.indexOf(name));
  const all = steps.flatMap((step) => [step[low], step[mid], step[high]]).filter((value) => value > 0);
  const [least, most] = [Math.log10(Math.min(...all)), Math.log10(Math.max(...all) * 1.05)];
  const y = (value) => SIZE.top + ((most - Math.log10(Math.max(value, 10 ** least))) / (most - least || 1)) * (SIZE.height - SIZE.top - SIZE.bottom);
  const slot = (SIZE.width - SIZE.left) / steps.length;
  const wide = Math.max(0.7, Math.min(18, slot * 0.8));
  const box = (x, from, to, name) => s("rect", { x, y: Math.min(y(from), y(to)), width: wide, height: Math.max(1.5, Math.abs(y(from) - y(to))), class: name });
  const nodes = [0, 0.5, 1].map((share) => 10 ** (least + share * (most - least))).flatMap((mark) => [s("line", { x1: SIZE.left, x2: SIZE.width, y1: y(mark), y2: y(mark), class: "axis" }), s("text", { x: SIZE.left - 6, y: y(mark) + 4, class: "label end" }, milliseconds(mark))]);
  steps.forEach((step, i) => {
    const x = SIZE.left + i * slot + (slot - wide) / 2;
    nodes.push(box(x, step[low], step[mid], "free"), box(x, step[mid], step[high], step[kind] === "prefill" ? "prefill" : step[high] > step[mid] ? "verify" : "cached"), s("rect", { x: x - 1, y: y(step[mid]) - 1, width: wide + 2, height: 2, class: "cursor" }));
  });
  nodes.push(s("text", { x: SIZE.left, y: SIZE.height - 6, class: "label" }, `step ${steps[0][0]}`), s("text", { x: SIZE.width, y: SIZE.height - 6, class: "label end" }, `step ${steps.at(-1)[0]}`));
  const sum = (index) => steps.reduce((total, step) => total + step[index], 0);
  const words = `${plural(steps.length, "step")}: limit ${milliseconds(sum(low))}, predicted ${milliseconds(sum(mid))}, measured ${milliseconds(sum(high))}`;
  const key = (name, text) => h("span", {}, h("i", { class: `key ${name}`, "aria-hidden": "true" }), text);
  return h("figure", { class: "curve" }, s("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": words }, nodes),
    h("figcaption", { class: "legend quiet" }, `${words}. `, key("free", "limit to predicted"), key("verify", "predicted to measured, slower"), key("cached", "the same, faster"), key("prefill", "the same, of a prompt")));
}

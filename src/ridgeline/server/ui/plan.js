// Plan: a model, a machine, a workload and objectives in; options, reasons and the front of the alternatives out.

import { post } from "./api.js";
import { splitBar, scatter } from "./charts.js";
import choices from "./data-plan.js";
import { asTable, bytes, command, field, h, milliseconds, number, plural } from "./dom.js";

const LOSSES = { int8: "weights in int8", int4: "weights in int4", "kv-int8": "KV cache in int8", "kv-fp8": "KV cache in fp8", "kv-int4": "KV cache in int4" };
const HEAD = ["options", "output tokens/s", "meet all", "TTFT p50", "TPOT p50"];

export function plan(server) {
  const here = server.use !== "files";
  const model = h("select", {}, here && h("option", { value: "" }, `${server.models[0]} (served here)`), choices.models.map((name) => h("option", { value: name }, name)));
  const machine = h("select", {}, here && h("option", { value: "" }, "this machine"), choices.cards.map(([name, title]) => h("option", { value: name }, title)));
  const amount = (value, max, more = {}) => h("input", { type: "number", inputmode: "numeric", min: 1, max, value, ...more });
  const inputs = { requests: amount(32, 256), input: amount(256, 16384), output: amount(64, 1024), users: amount(8, 256) };
  const slos = { ttft: amount("", null, { placeholder: "any", step: "any", min: 0 }), tpot: amount("", null, { placeholder: "any", step: "any", min: 0 }) };
  const losses = Object.entries(LOSSES).map(([name, words]) => {
    const box = h("input", { type: "checkbox", id: `allow-${name}`, value: name });
    return [box, h("div", { class: "check" }, box, h("label", { for: box.id }, words))];
  });
  const result = h("div", { class: "planned", "aria-live": "polite" }, here ? h("p", { class: "quiet" }, "Nothing is planned yet.") : h("p", { class: "quiet" }, "A plan simulates the engine, so it needs a server: ridgeline serve MODEL. Without one: ridgeline plan MODEL."));
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const go = h("button", { type: "submit", class: "primary" }, "Plan");
  const form = h("form", { class: "box planner" }, h("h2", {}, "What is to be served"), field("Model", model), field("Machine", machine, "A datasheet gives limits: no real engine is as fast."),
    h("div", { class: "pair" }, field("Requests", inputs.requests), field("At once", inputs.users), field("Tokens in", inputs.input), field("Tokens out", inputs.output)),
    h("div", { class: "pair" }, field("TTFT within, ms", slos.ttft), field("TPOT within, ms", slos.tpot)),
    h("fieldset", {}, h("legend", {}, "May lose quality"), losses.map(([, row]) => row)), go);

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    problem.hidden = true;
    result.replaceChildren(h("p", { class: "quiet" }, "Candidates are simulated, one after the other …"));
    try {
      const said = await (await post("explain/plan", asked())).json();
      result.replaceChildren(...shown(said));
    } catch (error) {
      result.replaceChildren();
      problem.textContent = error.message;
      problem.hidden = false;
    }
    go.disabled = false;
  });

  function asked() {
    const { requests, input, output, users } = inputs;
    const slo = Object.entries(slos).filter(([, control]) => control.value !== "").map(([name, control]) => `${name}:${control.value}`).join(" ");
    const allow = losses.filter(([box]) => box.checked).map(([box]) => box.value).join(",");
    const options = [machine.value && `--hardware=${machine.value}`, `--workload=fixed:num_requests=${requests.value},input_tokens=${input.value},output_tokens=${output.value}`, `--concurrency=${users.value}`, slo && `--slo=${slo}`, allow && `--allow=${allow}`];
    return [model.value, ...options].filter(Boolean);
  }

  return { element: h("section", { "aria-labelledby": "plan-title" }, h("h1", { id: "plan-title" }, "Plan"),
    h("p", { class: "lead" }, "Which options serve a load within objectives? Candidates are simulated by the engine's own scheduler; nothing is loaded."),
    h("div", { class: "plan" }, form, h("div", {}, problem, result))) };
}

function shown({ found, command: line }) {
  const { chosen } = found;
  const p50 = (latency) => (latency ? milliseconds(latency.p50) : "unknown");
  const name = (options) => Object.entries(options).map(([flag, value]) => `${flag} ${value}`).join(" ") || "the defaults";
  const rows = found.front.map(({ options, results, attainment }) => [name(options), number(results.output_throughput_tok_per_s), `${number(100 * attainment)} %`, p50(results.latencies.ttft_ms), p50(results.latencies.tpot_ms)]);
  const points = found.points.filter(([, , tpot]) => tpot > 0).map(([options, speed, tpot, attainment]) => [tpot, speed, options === name(chosen.options) ? "chosen" : attainment >= 0.95 ? "decode" : "prefill", options]);
  return [h("article", { class: "box" }, h("h2", {}, found.is_met ? "Serve with" : "No configuration searched meets it"), found.command && command(found.command), h("p", {}, found.sentence, " ", h("span", { class: "quiet" }, `[${chosen.provenance}]`)),
    h("h3", {}, "Why, and what the next best value would give"), found.reasons.length ? h("ul", {}, found.reasons.map((each) => h("li", {}, each))) : h("p", { class: "quiet" }, "No other value was searched."),
    h("h3", {}, "Memory"), splitBar(Object.entries(found.memory_bytes).map(([part, size]) => [part.replaceAll("_", " "), size, part === "weights" ? "decode" : "cached"]), bytes),
    h("h3", {}, plural(found.num_candidates, "candidate")), scatter("Candidates", "TPOT p50, ms", "output tokens/s", points),
    h("p", { class: "legend quiet" }, [["chosen", "chosen"], ["decode", "meets all objectives"], ["prefill", "does not"]].map(([kind, words]) => h("span", {}, h("i", { class: `key ${kind}`, "aria-hidden": "true" }), words))),
    h("p", {}, "No other candidate is both faster for all and for each:"), asTable("Front", HEAD, rows, true), h("p", { class: "quiet" }, `All times: ${chosen.provenance}. The same on the command line:`), command(line))];
}

// Doctor: what makes this server slow, which option to change, and what that would gain.

import { get } from "./api.js";
import { button, command, h, number, s } from "./dom.js";

const AREAS = { machine: "The machine", batching: "Batching", memory: "KV memory", precision: "Precision", speculation: "Drafts", clients: "Those who ask" };
const MOST = 10; // a gain that fills its bar

export function doctor() {
  const result = h("div", { class: "areas" });
  const sentence = h("p", { class: "lead", role: "status" }, "It has not looked yet.");
  const problem = h("p", { class: "error", role: "alert", hidden: true });
  const line = h("div", {});
  const again = button("Examine the last steps", () => look(), { class: "primary" });
  const element = h("section", { "aria-labelledby": "doctor-title" }, h("h1", { id: "doctor-title" }, "Doctor"), sentence, problem, h("div", { class: "row" }, again), result,
    h("p", { class: "quiet" }, "In the order in which to look: a fault of the machine makes the rest pointless. A gain is a counterfactual: the requests that were served, simulated as they were and once more with the change."), line);

  async function look() {
    if (again.disabled) return;
    again.disabled = true;
    sentence.textContent = "It simulates the last requests, with and without each change …";
    try {
      const said = await get("explain/doctor");
      problem.hidden = true;
      sentence.textContent = `${said.found.sentence}.`;
      result.replaceChildren(...Object.entries(AREAS).map(([area, title]) => section(title, said.found.findings.filter((each) => each.area === area))));
      line.replaceChildren(command(said.command.replace(/\S*recent\.journal/, "run.journal")));
    } catch (error) {
      sentence.textContent = "There is nothing to say.";
      problem.textContent = error.message;
      problem.hidden = false;
    }
    again.disabled = false;
  }

  return { element, enter: () => { look(); } };
}

function section(title, findings) {
  const verdict = findings.length ? (findings.some((each) => each.severity === "FIX") ? ["slip", "fix"] : ["own", "try"]) : ["good", "ok"];
  return h("article", { class: "box" }, h("h2", {}, title, " ", h("span", { class: `mark ${verdict[0]}` }, verdict[1])),
    findings.length ? findings.map(finding) : h("p", { class: "quiet" }, "Nothing found that would be worth a change."));
}

function finding(each) {
  const sentence = `${each.sentence[0].toUpperCase()}${each.sentence.slice(1)}`;
  return h("div", { class: "finding" }, h("h3", {}, `${sentence}.`), h("dl", {},
    h("dt", {}, "evidence"), h("dd", {}, `${each.evidence} `, h("span", { class: "quiet" }, "[from the record of the server]")),
    h("dt", {}, "change"), h("dd", {}, h("code", {}, each.flag), each.area === "precision" && each.severity === "try" ? " (it loses some quality)" : ""),
    h("dt", {}, "gain"), each.gain === null ? h("dd", {}, "unknown") : h("dd", {}, `${number(each.gain)} times: ${each.effect} `, h("span", { class: "quiet" }, `[${each.provenance}]`), gain(each.gain))));
}

function gain(value) {
  const width = (1000 * Math.min(value, MOST)) / MOST;
  return h("div", { class: "split" }, s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": `${number(value)} times` }, s("rect", { width, height: 10, class: "decode" }), s("rect", { x: 1000 / MOST, width: 3, height: 10, class: "cursor" })));
}

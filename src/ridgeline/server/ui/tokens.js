// Tokens with their probabilities: a list to walk through with a pointer, a finger or the arrow keys, and beside it
// what else the model had in mind.

import { h, percent, s } from "./dom.js";

const STEPS = [0.9, 0.6, 0.3, 0.1];

export const visible = (token) => (token === "" ? "∅" : token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣"));
const spoken = (token) => (token.trim() ? token : token.includes("\n") ? "line break" : "space");
const shade = (p) => STEPS.findIndex((least) => p >= least);

let lists = 0;

export function tokenList() {
  const id = `tokens-${++lists}`;
  const entries = [];
  const list = h("div", { class: "tokens", role: "listbox", tabindex: "0", "aria-label": "Tokens of the answer, each with its probability", "aria-orientation": "horizontal" });
  const inspector = h("div", { class: "inspector", "aria-live": "polite" }, h("p", { class: "quiet" }, "Point at a token, or walk through them with ← and →."));
  let active = -1;

  function select(index) {
    if (index < 0 || index >= entries.length || index === active) return;
    const nodes = list.children;
    if (active >= 0) nodes[active].setAttribute("aria-selected", "false");
    active = index;
    nodes[active].setAttribute("aria-selected", "true");
    list.setAttribute("aria-activedescendant", nodes[active].id);
    inspector.replaceChildren(...inspect(entries[active], active));
  }

  list.addEventListener("pointerover", (event) => event.target.role === "option" && select(Number(event.target.dataset.index)));
  list.addEventListener("click", (event) => event.target.role === "option" && select(Number(event.target.dataset.index)));
  list.addEventListener("focus", () => active < 0 && select(0));
  list.addEventListener("keydown", (event) => {
    const to = { ArrowRight: active + 1, ArrowLeft: active - 1, ArrowDown: active + 10, ArrowUp: active - 10, Home: 0, End: entries.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    select(Math.max(0, Math.min(entries.length - 1, to)));
    list.children[active].scrollIntoView({ block: "nearest" });
  });

  function add(added) {
    for (const entry of added) {
      const index = entries.push(entry) - 1;
      const p = Math.exp(entry.logprob);
      const node = h("span", { role: "option", id: `${id}-${index}`, class: `token p${shade(p) < 0 ? 4 : shade(p)}`, "aria-selected": "false", "aria-label": `${spoken(entry.token)}, ${percent(p)}`, "data-index": index }, entry.token.includes("\n") ? entry.token.replaceAll("\n", "⏎\n") : entry.token);
      list.append(node);
    }
  }

  return { element: h("div", { class: "token-view" }, list, inspector), add, get count() { return entries.length; }, entries };
}

function inspect(entry, index) {
  const top = [...entry.top].sort((a, b) => b.logprob - a.logprob);
  if (!top.some((other) => other.token === entry.token)) top.push(entry);
  const rest = Math.max(0, 1 - top.reduce((sum, other) => sum + Math.exp(other.logprob), 0));
  const row = (token, p, chosen) => h("tr", chosen ? { class: "chosen" } : {},
    h("th", { scope: "row" }, h("code", {}, token), chosen ? h("span", { class: "sr" }, " (chosen)") : null),
    h("td", { class: "num" }, percent(p)),
    h("td", { class: "meter" }, s("svg", { class: "share", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" }, s("rect", { width: 100 * p, height: 10, class: "decode" }))));
  return [
    h("p", {}, `Token ${index + 1}: `, h("code", {}, visible(entry.token)), ` had ${percent(Math.exp(entry.logprob))}`),
    h("table", {}, h("tbody", {}, top.map((other) => row(visible(other.token), Math.exp(other.logprob), other.token === entry.token)), rest > 0.0005 ? row("all others", rest, false) : null)),
  ];
}

// Entries of both APIs' log-probabilities in one shape.
export function entriesOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map((each) => ({ token: each.token, logprob: each.logprob, top: each.top_logprobs }));
  return (logprobs.tokens || []).map((token, i) => ({ token, logprob: logprobs.token_logprobs[i] ?? 0,
    top: Object.entries((logprobs.top_logprobs || [])[i] || {}).map(([name, logprob]) => ({ token: name, logprob })) }));
}

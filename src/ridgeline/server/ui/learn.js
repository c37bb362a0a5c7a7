// Learn: one idea of inference each, with sliders. Every figure was computed by `ridgeline explain`; a slider stands at
// stops that were computed, the others at their defaults.

import { cells, curves, splitBar } from "./charts.js";
import { asTable, button, h, milliseconds } from "./dom.js";

const FIRST = "kv";
const TITLES = { walk: "A request, step by step", growth: "KV cache as it grows", scheduling: "Static or continuous", stack: "All five together", kv: "KV cache", moe: "Mixture of experts", cache: "Cache or not", fit: "Does it fit?", dtypes: "Dtypes", variants: "Kinds of attention" };
const title = ({ name }) => TITLES[name] || name[0].toUpperCase() + name.slice(1);
const WALK = { name: "walk", summary: "What one request goes through, from HTTP to tokens, in a real run" };
const words = (name) => name.replaceAll("_", " ");

export function learn() {
  const element = h("section", { class: "learn", "aria-labelledby": "learn-title" }, h("h1", { id: "learn-title" }, "Learn"), h("p", { class: "lead" }, "…"));
  import("./data-learn.js").then(({ default: data }) => show(element, data));
  return { element };
}

function show(element, explorers) {
  const card = h("article", { class: "box", "aria-live": "off" });
  explorers = [...explorers, WALK];
  const links = explorers.map((each) => h("button", { type: "button", onclick: () => choose(each) }, h("strong", {}, title(each)), h("span", { class: "quiet" }, each.summary)));
  function choose(explorer) {
    links.forEach((link, i) => link.setAttribute("aria-pressed", String(explorers[i] === explorer)));
    card.replaceChildren(...(explorer === WALK ? [h("h2", {}, title(WALK)), h("p", {}, "…")] : explore(explorer)));
    if (explorer === WALK) import("./data-walk.js").then(({ default: data }) => links.at(-1).getAttribute("aria-pressed") === "true" && card.replaceChildren(...walk(data)));
  }
  element.lastChild.replaceWith(h("p", { class: "lead" }, "What limits inference, one idea at a time. Move a slider: every figure says how it follows and what it rests on."),
    h("div", { class: "ideas" }, h("div", { class: "list", role: "group", "aria-label": "Ideas" }, links), card));
  choose(explorers.find((each) => each.name === FIRST) || explorers[0]);
}

const big = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const shown = (value) => (typeof value === "number" ? (Math.abs(value) >= 1e6 ? big.format(value) : value.toLocaleString("en", { maximumSignificantDigits: 6 })) : String(value));

function explore(explorer) {
  const result = h("div", { class: "result" });
  const command = h("code", {});
  const sliders = [];
  const draw = (input = null, index = 0) => {
    const [sentence, figures, series, grids] = input ? input.at[index].map((part, i) => (i ? part.map((each, j) => explorer.at[i][j].map((old, k) => (each && each[k]) || old)) : part)) : explorer.at;
    const moved = input && input.stops[index] !== input.default;
    command.textContent = `ridgeline explain ${explorer.name}${moved ? ` --${input.name.replaceAll("_", "-")} ${input.stops[index]}` : ""}`;
    result.replaceChildren(h("p", { class: "lead", role: "status" }, sentence), ...series.map(([ys, marks, xs, ...names]) => curves(...names, xs.map((x, i) => [x, ys[i]]), marks)).filter(Boolean), ...grids.map(([rows, name]) => cells(name, rows)),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Figures" }, h("table", { class: "plain" }, h("thead", {}, h("tr", {}, ["figure", "value", "how it follows", "rests on"].map((head) => h("th", { scope: "col" }, head)))),
        h("tbody", {}, figures.map(([text, formula, name, provenance]) => h("tr", {}, h("th", { scope: "row" }, words(name)), h("td", { class: "num strong" }, text), h("td", {}, formula), h("td", { class: "quiet" }, provenance)))))));
  };
  for (const input of explorer.inputs.filter((each) => each.stops.length > 1)) {
    const at = Math.max(0, input.stops.indexOf(input.default));
    const id = `${explorer.name}-${input.name}`;
    const range = h("input", { type: "range", id, min: 0, max: input.stops.length - 1, step: 1, value: at, "aria-describedby": `${id}-help` });
    const value = h("output", { for: id }, shown(input.stops[at]));
    const set = (index) => {
      range.value = index;
      value.textContent = shown(input.stops[index]);
      range.setAttribute("aria-valuetext", shown(input.stops[index]));
    };
    set(at);
    range.addEventListener("input", () => {
      for (const other of sliders) if (other.range !== range) other.reset();
      set(Number(range.value));
      draw(input, Number(range.value));
    });
    sliders.push({ range, reset: () => set(at) });
    sliders.at(-1).element = h("div", { class: "slider" }, h("label", { for: id }, words(input.name)), value, range, h("p", { id: `${id}-help`, class: "quiet" }, input.help));
  }
  draw();
  return [h("h2", {}, title(explorer)), h("p", {}, explorer.summary), h("div", { class: "sliders" }, sliders.map((each) => each.element)), result,
    h("p", { class: "quiet" }, "One slider moves at a time; the others go back to their defaults. On the command line all move: ", command), practice(explorer.question)];
}

// The stages of a request, as they were.
const DRAW = { text: (text) => h("pre", { class: "scroll", tabindex: "0" }, text), cells: (each) => cells(...each), table: (each) => asTable(...each, true), split: (parts) => splitBar(parts, milliseconds) };

const walk = ({ machine, stages }) => [h("h2", {}, title(WALK)), h("p", {}, `${WALK.summary}: ${machine}.`),
  h("ol", { class: "walk" }, stages.map(([name, says, kind, what]) => h("li", {}, h("h3", {}, name), h("p", {}, says), DRAW[kind](what))))];

// A question whose answers say what is right, or which slip leads there.
function practice({ ask, answers }) {
  const verdict = h("p", { role: "status" });
  const options = answers.map(([text, right, why]) => button(text, () => {
    options.forEach((each, i) => { each.className = answers[i][1] ? "good" : ""; each.setAttribute("aria-pressed", String(each === option(text))); });
    verdict.textContent = `${right ? "Right" : "No"}: ${why}.`;
  }));
  const option = (text) => options[answers.findIndex(([each]) => each === text)];
  return h("section", { class: "practice", "aria-label": "Practice" }, h("h3", {}, ask), h("div", { class: "row" }, options), verdict);
}

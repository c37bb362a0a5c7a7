// Numbers: what texts on inference say, computed again, with what is right beside each.

import { button, field, h } from "./dom.js";

export function numbers() {
  const element = h("section", { "aria-labelledby": "numbers-title" }, h("h1", { id: "numbers-title" }, "Numbers"), h("p", { class: "lead" }, "…"));
  import("./data-numbers.js").then(({ default: data }) => show(element, data));
  return { element };
}

function show(element, { texts, statuses, rows }) {
  const slips = rows.filter((row) => row.status === "✗").length;
  const chosen = new Set();
  const search = h("input", { type: "search", placeholder: "KV cache, H100, batch …" });
  const count = h("p", { class: "quiet", role: "status" });
  const list = h("ol", { class: "rows" });
  const chips = Object.entries(statuses).map(([status, words]) => {
    const chip = button(h("span", {}, h("span", { class: `mark ${kind(status)}`, "aria-hidden": "true" }, status), ` ${words.split(/[:,]/)[0]}`), () => {
      if (!chosen.delete(status)) chosen.add(status);
      chip.setAttribute("aria-pressed", String(chosen.has(status)));
      filter();
    }, { "aria-pressed": "false" });
    return chip;
  });
  const items = rows.map((row) => [row, item(row, texts, statuses)]);
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = items.filter(([row]) => (!chosen.size || chosen.has(row.status)) && words.every((word) => `${row.id} ${row.says} ${row.right} ${row.derivation}`.toLowerCase().includes(word)));
    list.replaceChildren(...found.map(([, node]) => node));
    count.textContent = `${found.length} of ${rows.length} numbers`;
  }
  search.addEventListener("input", filter);
  element.lastChild.replaceWith(h("p", { class: "lead" }, `${rows.length} numbers that lectures and texts on inference name, each computed again from its inputs. ${slips} are slips: the right value stands beside them.`),
    h("div", { class: "box filters" }, field("Search", search), h("div", { class: "row", role: "group", "aria-label": "Only these" }, chips)), count, list,
    h("p", { class: "quiet" }, "The same on the command line: ", h("code", {}, "ridgeline explain lecture"), "."));
  filter();
}

const kind = (status) => ({ "=": "good", "≈": "good", "✗": "slip", "+": "own" })[status] || "own";
const plain = (value) => (typeof value === "number" ? value.toLocaleString("en", { maximumSignificantDigits: 12 }) : String(value));

function item(row, texts, statuses) {
  const inputs = Object.entries(row.inputs).map(([name, value]) => `${name} ${plain(value)}`).join(", ");
  const sources = [...row.texts].filter((letter) => texts[letter]).map((letter) => texts[letter]);
  return h("li", { class: "box number" }, h("span", { class: `mark ${kind(row.status)}`, role: "img", "aria-label": statuses[row.status], title: statuses[row.status] }, row.status),
    h("div", {}, h("h2", {}, row.id.replaceAll("-", " ")),
      h("dl", {}, h("dt", {}, row.status === "+" ? "asked" : "said"), h("dd", {}, row.says), h("dt", {}, row.status === "lit" ? "here" : "right"), h("dd", { class: "right" }, row.right)),
      h("details", {}, h("summary", {}, "Where it comes from"), h("p", {}, `${row.derivation}.`), inputs && h("p", { class: "quiet" }, `Inputs: ${inputs}.`), sources.length > 0 && h("p", { class: "quiet" }, `Said by: ${sources.join("; ")}.`),
        h("p", { class: "quiet" }, `Provenance: ${row.provenance}. `, h("code", {}, `ridgeline explain lecture ${row.id}`)))));
}

// Elements out of names, attributes and children. Texts are only ever text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined && child !== false) node.append(child);
  return node;
}

export const h = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
export const s = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
export const $ = (id) => document.getElementById(id);

export function button(label, onclick, attributes = {}) {
  return h("button", { type: "button", onclick, ...attributes }, label);
}

// A label with its control; `help` is read with it.
let labels = 0;
export function field(label, control, help = "") {
  const id = control.id || `field-${++labels}`;
  control.id = id;
  if (help) control.setAttribute("aria-describedby", `${id}-help`);
  return h("div", { class: "field" }, h("label", { for: id }, label), control, help && h("p", { id: `${id}-help`, class: "quiet" }, help));
}

const digits = (value, most) => value.toLocaleString("en", { maximumFractionDigits: most });

export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  return digits(value, size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
}

export function milliseconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value >= 10000 ? `${number(value / 1000)} s` : `${number(value)} ms`;
}

export const percent = (share) => (share === null || Number.isNaN(share) ? "–" : `${digits(share * 100, share < 0.1 ? 1 : 0)} %`);

export function bytes(value) {
  const names = ["B", "kB", "MB", "GB", "TB"];
  let index = 0;
  for (; value >= 1000 && index < names.length - 1; index++) value /= 1000;
  return `${number(value)} ${names[index]}`;
}

// A command line to copy.
export function command(line) {
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(line);
    copy.textContent = "Copied";
  });
  return h("div", { class: "command" }, h("code", {}, line), navigator.clipboard && copy);
}

// A table that is asked for, or open from the start.
export function asTable(name, head, rows, open = false) {
  const cells = (row) => row.map((cell, i) => (i ? h("td", { class: "num" }, cell) : h("th", { scope: "row" }, cell)));
  return h("details", { open }, h("summary", {}, open ? name : `${name} as table`), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name },
    h("table", { class: "plain" }, h("thead", {}, h("tr", {}, head.map((each, i) => h("th", { scope: "col", class: i ? "num" : "" }, each)))), h("tbody", {}, rows.map((row) => h("tr", {}, cells(row)))))));
}

export const plural = (count, one, many = `${one}s`) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;

// Drawings in SVG: a bar in parts, a line over time. Each is an image with a sentence that says what it shows.

import { h, s } from "./dom.js";

// Parts of a whole: [name, value, class]. The legend has the numbers, so colour alone says nothing.
export function splitBar(parts, text) {
  const whole = parts.reduce((sum, [, value]) => sum + Math.max(0, value || 0), 0) || 1;
  let at = 0;
  const rects = parts.map(([, value, kind]) => {
    const width = (1000 * Math.max(0, value || 0)) / whole;
    const rect = s("rect", { x: at, y: 0, width, height: 10, class: `part ${kind}` });
    at += width;
    return rect;
  });
  const words = parts.map(([name, value]) => `${name} ${text(value)}`).join(", ");
  return h("figure", { class: "split" },
    s("svg", { viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": words }, rects),
    h("figcaption", {}, parts.map(([name, value, kind]) => h("span", {}, h("i", { class: `key ${kind}`, "aria-hidden": "true" }), `${name} ${text(value)}`))));
}

// Values over time, oldest first, one a second: an area and a line, from 0 to `most`. null: unknown, a gap.
export function spark(lines, { most, seconds, words }) {
  const width = seconds - 1;
  const y = (value) => 40 - (38 * Math.min(value, most)) / (most || 1);
  const shapes = lines.flatMap(([values, kind]) => runs(values, seconds).flatMap((run) => {
    const points = run.map(([x, value]) => `${x},${y(value).toFixed(2)}`);
    const line = s("polyline", { points: (points.length > 1 ? points : [`${run[0][0] - 1},${y(run[0][1])}`, ...points]).join(" "), class: `line ${kind}`, "vector-effect": "non-scaling-stroke" });
    return kind.includes("filled") ? [s("polygon", { points: `${run[0][0]},40 ${points.join(" ")} ${run.at(-1)[0]},40`, class: `area ${kind}` }), line] : [line];
  }));
  return s("svg", { class: "spark", viewBox: `0 0 ${width} 40`, preserveAspectRatio: "none", role: "img", "aria-label": words },
    s("line", { x1: 0, x2: width, y1: 40, y2: 40, class: "axis", "vector-effect": "non-scaling-stroke" }), shapes);
}

function runs(values, seconds) {
  const found = [];
  let run = [];
  values.forEach((value, index) => {
    if (value === null || Number.isNaN(value)) {
      if (run.length) found.push(run);
      run = [];
    } else run.push([seconds - values.length + index, value]);
  });
  if (run.length) found.push(run);
  return found;
}

const MARGIN = { left: 64, right: 14, top: 12, bottom: 34 };
const SIZE = { width: 640, height: 240 };
const PREFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
const digits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

function short(value) {
  const [scale, prefix] = PREFIXES.find(([least]) => Math.abs(value) >= least) || [1, ""];
  return `${digits.format(value / scale)}${prefix && `\u202f${prefix}`}`;
}

// Rows of cells: a label, texts with | between them, and a kind for each, a digit or a point where nothing is.
export function cells(name, rows) {
  const words = `${name}: ${rows.map(([label, texts]) => `${label} ${texts.replaceAll("|", " ")}`).join("; ")}`;
  return h("figure", { class: "cells" }, h("figcaption", { class: "quiet" }, name), h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, h("div", { role: "img", "aria-label": words }, rows.map(([label, texts, kinds]) =>
    h("p", {}, h("b", {}, label), texts.split("|").slice(0, kinds.length).map((text, i) => h("i", { class: `c${kinds[i] === "." ? "" : kinds[i]}` }, text)))))));
}

// A curve over its axes, logarithmic where values go far, with marks: the axis, where, and what is there.
export function curves(name, x, y, points, marks = []) {
  const known = points.filter(([a, b]) => a !== null && b !== null);
  if (known.length < 2) return null;
  const { nodes, across, up } = axes(x, y, [...known, ...marks.map(([axis, at]) => (axis === "x" ? [at, known[0][1]] : [known[0][0], at]))]);
  for (const [axis, at, words] of marks) {
    const place = axis === "x" ? { x1: across.at(at), x2: across.at(at), y1: MARGIN.top, y2: SIZE.height - MARGIN.bottom } : { x1: MARGIN.left, x2: SIZE.width - MARGIN.right, y1: up.at(at), y2: up.at(at) };
    nodes.push(s("line", { ...place, class: "line second" }), s("text", { x: axis === "x" ? place.x1 - 6 : place.x1 + 6, y: axis === "x" ? place.y2 - 8 : place.y1 + 22, class: `label${axis === "x" ? " end" : ""}` }, words));
  }
  nodes.push(s("polyline", { class: "line", points: known.map(([a, b]) => `${across.at(a)},${up.at(b)}`).join(" ") }), known.map(([a, b]) => s("circle", { cx: across.at(a), cy: up.at(b), r: 3, class: "decode" }, s("title", {}, `${short(a)} ${x}: ${short(b)} ${y}`))));
  const [first, last] = [known[0], known.at(-1)];
  return plot(name, nodes, `${name}: ${y} over ${x}, from ${short(first[1])} at ${short(first[0])} to ${short(last[1])} at ${short(last[0])}`);
}

// Points over two axes: [x, y, class, name]. What is chosen is larger.
export function scatter(name, x, y, points) {
  if (points.length < 2) return null;
  const { nodes, across, up } = axes(x, y, points);
  const best = points.find(([, , kind]) => kind === "chosen");
  nodes.push(points.map(([a, b, kind, words]) => s("circle", { cx: across.at(a), cy: up.at(b), r: kind === "chosen" ? 7 : 4, class: kind }, s("title", {}, `${words}: ${short(b)} ${y}, ${short(a)} ${x}`))));
  return plot(name, nodes, `${points.length} candidates: ${y} over ${x}${best ? `; chosen: ${short(best[1])} at ${short(best[0])}` : ""}`);
}

const plot = (name, nodes, words) => h("figure", { class: "curve" }, s("svg", { viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": words }, nodes), h("figcaption", { class: "quiet" }, name));

function axes(x, y, known) {
  const scale = (values, from, to) => {
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const far = low > 0 && high / low > 30;
    const f = far ? Math.log : (value) => value;
    const base = far ? f(low) : Math.min(0, low);
    const span = f(high) - base || 1;
    const marks = far ? powers(low, high) : [0, 0.5, 1].map((share) => base + share * span);
    return { at: (value) => from + ((f(value) - base) / span) * (to - from), marks };
  };
  const across = scale(known.map(([a]) => a), MARGIN.left, SIZE.width - MARGIN.right);
  const up = scale(known.map(([, b]) => b), SIZE.height - MARGIN.bottom, MARGIN.top);
  const nodes = [];
  for (const mark of up.marks) nodes.push(s("line", { x1: MARGIN.left, x2: SIZE.width - MARGIN.right, y1: up.at(mark), y2: up.at(mark), class: "axis" }), s("text", { x: MARGIN.left - 8, y: up.at(mark) + 4, class: "label end" }, short(mark)));
  for (const mark of across.marks) nodes.push(s("text", { x: across.at(mark), y: SIZE.height - MARGIN.bottom + 18, class: `label ${across.at(mark) > SIZE.width - 2 * MARGIN.right ? "end" : "mid"}` }, short(mark)));
  nodes.push(s("text", { x: SIZE.width - MARGIN.right, y: SIZE.height - 2, class: "label end" }, x), s("text", { x: MARGIN.left + 6, y: MARGIN.top + 4, class: "label" }, y));
  return { nodes, across, up };
}

function powers(low, high) {
  const all = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * 1.0001; power++) all.push(10 ** power);
  const every = Math.ceil(all.length / 5) || 1;
  const marks = all.filter((_, i) => i % every === 0);
  return marks.length > 1 ? marks : [low, high];
}

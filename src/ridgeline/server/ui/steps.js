// Steps: who ran in each step of the scheduler, with how many tokens, and what it decided; replayed, two side by side.

import { get } from "./api.js";
import { cells, splitBar } from "./charts.js";
import examples from "./data-examples.js";
import { button, field, h, milliseconds, number, plural, s } from "./dom.js";
import { readJournal, runOf, stepAt } from "./journal.js";

const EVERY_MS = 1000;
const KEPT = 4096; // steps of the live engine
const CELL = { width: 26, height: 20, label: 52 };
const BINS = 480; // columns of the overview
const SPEEDS = [0.01, 0.03, 0.1, 0.3, 1];
const WAITS = { slots: "all slots are taken", budget: "this step's budget of tokens is used up", blocks: "too few blocks of the KV cache are free", just_preempted: "a sequence was just preempted", together: "its request's sequences start together" };
const [LIVE, FILE] = ["live", "file"];

export function steps(server) {
  return new Steps(server.use === "files" ? ["A recording", "the last steps of a server"] : ["This server", "live: its last steps"]).page();
}

class Steps {
  constructor(live) {
    this.now = 0;
    this.following = false;
    this.timer = null;
    this.panes = [new Pane(this, "A", "1", live), new Pane(this, "B", "0", live)];
    this.slider = h("input", { type: "range", min: 0, max: 1000, step: 1, value: 0, "aria-label": "Time in the run" });
    this.clock = h("output", { class: "clock" });
    this.play = button("Play", () => this.toggle(), { class: "primary" });
    this.speed = h("select", { "aria-label": "Speed" }, SPEEDS.map((each) => h("option", { value: each, selected: each === 0.1 }, each === 1 ? "as it was" : `× ${each}`)));
    this.both = h("input", { type: "checkbox", id: "both" });
  }

  page() {
    this.slider.addEventListener("input", () => { this.pause(); this.seek((this.slider.value / 1000) * this.seconds); });
    this.both.addEventListener("change", () => this.arrange());
    const controls = h("div", { class: "box controls", role: "group", "aria-label": "Replay" },
      h("div", { class: "row" }, button("|◀", () => this.to(0), { "aria-label": "First step" }), button("◀", () => this.step(-1), { "aria-label": "Step back" }), this.play,
        button("▶", () => this.step(1), { "aria-label": "Step on" }), button("▶|", () => this.to(Infinity), { "aria-label": "Last step" }), this.speed,
        h("span", { class: "check" }, this.both, h("label", { for: "both" }, "Two side by side"))),
      h("div", { class: "row wide" }, this.slider, this.clock),
      h("p", { class: "quiet" }, "← and → step, space plays. Both runs share one clock."));
    this.element = h("section", { class: "steps", "aria-labelledby": "steps-title", tabindex: "-1" }, h("h1", { id: "steps-title" }, "Steps"),
      h("p", { class: "lead" }, "In every step the scheduler puts sequences into one batch: a part of a prompt, or one token of an output. A row is a sequence, a column is a step."),
      legend(), controls, h("div", { class: "panes" }, this.panes.map((pane) => pane.element)));
    for (const pane of this.panes) pane.load();
    this.arrange();
    const keys = (event) => {
      if (event.target.closest("input, select, textarea, summary, dialog") || event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key === "ArrowRight") this.step(1);
      else if (event.key === "ArrowLeft") this.step(-1);
      else if (event.key === " " && !event.target.closest("button, a")) this.toggle();
      else return;
      event.preventDefault();
    };
    return { element: this.element, enter: () => {
      document.addEventListener("keydown", keys);
      const sized = new ResizeObserver(() => this.draw());
      sized.observe(this.element);
      const poll = setInterval(() => document.hidden || this.shown.forEach((pane) => pane.poll()), EVERY_MS);
      return () => { document.removeEventListener("keydown", keys); sized.disconnect(); clearInterval(poll); this.pause(); };
    } };
  }

  get shown() { return this.both.checked ? this.panes : this.panes.slice(0, 1); }
  get seconds() { return Math.max(0.001, ...this.shown.map((pane) => pane.run.seconds)); }

  arrange() {
    this.panes[1].element.hidden = !this.both.checked;
    this.element.classList.toggle("two", this.both.checked);
    this.changed();
  }

  changed() {
    this.seek(Math.min(this.now, this.seconds));
  }

  seek(seconds) {
    this.now = Math.max(0, seconds);
    this.slider.value = Math.round((1000 * this.now) / this.seconds);
    const words = `${milliseconds(this.now * 1000)} of ${milliseconds(this.seconds * 1000)}`;
    this.clock.textContent = words;
    this.slider.setAttribute("aria-valuetext", words);
    this.draw();
  }

  draw() {
    for (const pane of this.shown) pane.draw(this.now, this.seconds);
  }

  step(by) {
    this.pause();
    const { run } = this.panes[0];
    if (run.steps.length) this.seek(run.steps[Math.max(0, Math.min(run.steps.length - 1, stepAt(run, this.now) + by))].at);
  }

  to(seconds) {
    this.pause();
    this.seek(Math.min(seconds, this.seconds));
  }

  toggle() {
    if (this.timer) return this.pause();
    if (this.now >= this.seconds * 0.999) this.now = 0;
    let last = performance.now();
    const tick = (at) => {
      this.timer = requestAnimationFrame(tick);
      this.seek(this.now + ((at - last) / 1000) * Number(this.speed.value));
      last = at;
      if (this.now >= this.seconds) this.pause();
    };
    this.timer = requestAnimationFrame(tick);
    this.play.textContent = "Pause";
  }

  pause() {
    if (this.timer) cancelAnimationFrame(this.timer);
    this.timer = null;
    this.play.textContent = "Play";
  }
}

class Pane {
  constructor(steps, letter, chosen, [group, words]) {
    this.steps = steps;
    this.run = { steps: [], seconds: 0, most: 1, name: "" };
    this.live = null;
    this.drawn = null;
    this.source = h("select", { id: `source-${letter}` }, h("optgroup", { label: group }, h("option", { value: LIVE }, words)),
      h("optgroup", { label: "Simulated: Llama 3 8B on an H100" }, examples.map((each, i) => h("option", { value: i, selected: String(i) === chosen }, each.name))),
      h("optgroup", { label: "A file" }, h("option", { value: FILE }, "open a journal …")));
    this.file = h("input", { type: "file", "aria-label": "Journal", hidden: true });
    this.says = h("p", { class: "quiet" });
    this.overview = h("div", { class: "overview" });
    this.lanes = h("div", { class: "lanes" });
    this.detail = h("div", { class: "detail" });
    this.problem = h("p", { class: "error", role: "alert", hidden: true });
    this.element = h("article", { class: "box pane", "aria-label": `Run ${letter}` }, field(`Run ${letter}`, this.source), this.file, this.says, this.problem, this.overview, this.lanes, this.detail);
    this.source.addEventListener("change", () => (this.source.value === FILE ? this.file.click() : this.load()));
    this.file.addEventListener("change", () => this.open());
    this.overview.addEventListener("pointerdown", (event) => this.point(event));
    this.overview.addEventListener("pointermove", (event) => event.buttons && this.point(event));
  }

  point(event) {
    const box = this.overview.getBoundingClientRect();
    this.steps.pause();
    this.steps.seek(((event.clientX - box.left) / box.width) * this.steps.seconds);
  }

  load() {
    this.fail("");
    if (this.source.value === LIVE) {
      this.live = null;
      this.says.textContent = "What the engine did last, once a second. Idle time is cut.";
      this.show(runOf(empty(), "live"));
      this.poll();
    } else {
      const example = examples[Number(this.source.value)];
      this.says.replaceChildren(`${example.says} `, h("details", {}, h("summary", {}, `times: ${example.provenance}`), h("code", {}, example.command)));
      this.show({ ...runOf(example, example.name), blocks: example.blocks });
      this.steps.now = 0;
      this.steps.changed();
    }
  }

  async open() {
    const file = this.file.files[0];
    if (!file) return;
    try {
      const records = readJournal(await file.arrayBuffer(), examples[0].wait_reasons);
      this.says.textContent = `${file.name}: ${records.setup.config.model.model}, ${plural(records.steps.rows.length, "step")}.${records.cut ? " It was cut off: what came after these is lost." : ""}`;
      this.fail("");
      this.show(runOf(records, file.name));
      this.steps.now = 0;
      this.steps.changed();
    } catch (error) {
      this.fail(error.message);
    }
    this.file.value = "";
  }

  fail(words) {
    this.problem.textContent = words;
    this.problem.hidden = !words;
  }

  show(run) {
    this.run = run;
    this.drawn = null;
  }

  async poll() {
    if (this.source.value !== LIVE || this.polling) return;
    this.polling = true;
    try {
      const from = (name) => (this.live ? this.live[name].first + this.live[name].rows.length : 0);
      const found = await get(`explain/steps?steps=${from("steps")}&spans=${from("spans")}&decisions=${from("decisions")}`);
      if (this.live && found.steps.first < from("steps")) this.live = null; // another engine, which counts anew
      this.live ??= { ...found, steps: { ...found.steps, rows: [] }, spans: { ...found.spans, rows: [] }, decisions: { ...found.decisions, rows: [] } };
      Object.assign(this.live, { wait_reasons: found.wait_reasons, cache_reasons: found.cache_reasons });
      if (!found.steps.rows.length && this.run.steps.length) return;
      for (const name of ["steps", "spans", "decisions"]) take(this.live[name], found[name], name === "spans" ? 2 * KEPT : KEPT);
      const atEnd = this.steps.now >= this.steps.seconds * 0.995 || !this.run.steps.length;
      this.show(runOf(this.live, "live"));
      this.fail("");
      if (!this.run.steps.length) this.says.textContent = "The engine has computed nothing yet. Ask something on the Chat page.";
      if (this.run.steps.length) this.says.textContent = "What the engine did last, once a second. Idle time is cut.";
      this.steps.seek(atEnd ? this.steps.seconds : this.steps.now);
    } catch (error) {
      this.fail(error.message);
    } finally {
      this.polling = false;
    }
  }

  draw(seconds, whole) {
    const { run } = this;
    if (!run.steps.length) {
      this.overview.replaceChildren();
      this.lanes.replaceChildren();
      this.detail.replaceChildren();
      return;
    }
    const index = stepAt(run, seconds);
    const width = Math.max(240, this.lanes.clientWidth || 600);
    const key = `${index} ${width} ${whole}`;
    if (this.drawn === null || this.drawn.whole !== whole) this.overview.replaceChildren(overview(run, whole));
    if (this.drawn?.key !== key) {
      this.lanes.replaceChildren(lanes(run, index, width));
      this.detail.replaceChildren(...detail(run.steps[index], run), blockMap(run, index));
    }
    this.drawn = { key, whole };
    this.overview.firstChild.lastChild.setAttribute("x", (1000 * seconds) / whole);
    this.element.classList.toggle("over", seconds > run.seconds);
  }
}

const empty = () => ({ steps: { first: 0, fields: [], rows: [] }, spans: { first: 0, fields: [], rows: [] }, decisions: { first: 0, fields: [], rows: [] }, wait_reasons: [], cache_reasons: [] });

function take(ring, added, most) {
  if (!added.rows.length) return;
  if (added.first !== ring.first + ring.rows.length) Object.assign(ring, { first: added.first, rows: [] }); // some were lost
  ring.rows.push(...added.rows);
  const gone = ring.rows.length - most;
  if (gone > 0) {
    ring.rows.splice(0, gone);
    ring.first += gone;
  }
}

function legend() {
  const item = (kind, words) => h("span", {}, h("i", { class: `key ${kind}`, "aria-hidden": "true" }), words);
  return h("p", { class: "legend quiet" }, item("prefill", "prefill: tokens of a prompt"), item("decode", "decode: one token of an output"), item("verify", "verify: drafted tokens"));
}

// All steps over time: as wide as they took, as high as they had tokens.
function overview(run, whole) {
  const bins = new Map();
  for (const step of run.steps) {
    const bin = Math.floor((BINS * step.at) / whole);
    const found = bins.get(bin);
    if (!found) bins.set(bin, { ...step, end: step.at + step.duration });
    else {
      found.end = step.at + step.duration;
      if (step.tokens > found.tokens) Object.assign(found, { tokens: step.tokens, prefill: step.prefill, decode: step.decode, verify: step.verify });
    }
  }
  const scale = (tokens) => 44 * Math.log2(1 + tokens) / Math.log2(1 + run.most);
  const rects = [...bins.values()].flatMap((bin) => {
    const x = (1000 * bin.at) / whole;
    const width = Math.max(1, (1000 * (bin.end - bin.at)) / whole - 0.4);
    const height = scale(bin.tokens);
    let y = 46;
    return ["decode", "verify", "prefill"].filter((kind) => bin[kind]).map((kind) => {
      const part = (height * bin[kind]) / bin.tokens;
      y -= part;
      return s("rect", { x, y, width, height: part, class: kind });
    });
  });
  return s("svg", { viewBox: "0 0 1000 48", preserveAspectRatio: "none", role: "img", "aria-label": `${plural(run.steps.length, "step")} in ${milliseconds(run.seconds * 1000)}, up to ${plural(run.most, "token")} in one` },
    s("line", { x1: 0, x2: 1000, y1: 46.5, y2: 46.5, class: "axis", "vector-effect": "non-scaling-stroke" }), rects, s("rect", { x: 0, y: 0, width: 2.5, height: 48, class: "cursor" }));
}

// Whose the first blocks of the KV cache are in a step: a sequence's number, or how many share it.
function blockMap({ blocks, steps }, index) {
  if (!blocks) return "";
  const tables = new Map(blocks.slice(0, index + 1).flat().map(([seq, ...ids]) => [seq, ids]));
  const owners = steps[index].spans.map(({ seq }) => seq);
  const most = Math.max(...blocks.flat().flatMap(([, ...ids]) => ids));
  const rows = [];
  for (let first = 0; first <= most; first += 16) {
    const of = Array.from({ length: 16 }, (_, i) => owners.filter((seq) => tables.get(seq)?.includes(first + i)));
    rows.push([String(first), of.map((seqs) => (seqs.length > 1 ? `${seqs.length}×` : seqs[0] ?? "")).join("|"), of.map((seqs) => (seqs.length ? seqs[0] % 8 : ".")).join("")]);
  }
  return cells("Blocks: whose each is, or how many share it", rows);
}

// The steps around one: a row for each sequence that runs in them.
function lanes(run, index, width) {
  const count = Math.max(6, Math.floor((width - CELL.label) / CELL.width));
  const first = Math.max(0, Math.min(index - Math.floor(count * 0.6), run.steps.length - count));
  const seen = run.steps.slice(first, first + count);
  const rows = [...new Set(seen.flatMap((step) => step.spans.map((span) => span.seq)))].sort((a, b) => a - b);
  const row = new Map(rows.map((seq, i) => [seq, i]));
  const height = 20 + Math.max(1, rows.length) * CELL.height + 4;
  const nodes = [s("rect", { x: CELL.label + (index - first) * CELL.width, y: 0, width: CELL.width, height, class: "here", rx: 4 })];
  for (const [seq, i] of row) nodes.push(s("text", { x: 0, y: 20 + i * CELL.height + 14, class: "lane" }, `seq ${seq}`));
  seen.forEach((step, i) => {
    const x = CELL.label + i * CELL.width;
    if ((step.number % 5 === 0 && count > 8) || first + i === index) nodes.push(s("text", { x: x + CELL.width / 2, y: 13, class: first + i === index ? "tick now" : "tick" }, step.number));
    for (const span of step.spans) {
      const y = 20 + row.get(span.seq) * CELL.height;
      nodes.push(s("rect", { x: x + 1, y: y + 1.5, width: CELL.width - 2, height: CELL.height - 3, rx: 3, class: span.kind }));
      if (span.tokens > 1) nodes.push(s("text", { x: x + CELL.width / 2, y: y + 14, class: "count" }, span.tokens > 9999 ? `${Math.round(span.tokens / 1000)}k` : span.tokens));
    }
    for (const each of step.preempted) if (row.has(each.seq)) nodes.push(s("text", { x: x + CELL.width / 2, y: 20 + row.get(each.seq) * CELL.height + 15, class: "preempted" }, "✕"));
  });
  const words = `Step ${run.steps[index].number}. ${sentence(run.steps[index])}`;
  return s("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": words }, nodes);
}

const names = (seqs) => `sequence${seqs.length > 1 ? "s" : ""} ${seqs.join(", ")}`;

function sentence(step) {
  const of = (kind) => step.spans.filter((span) => span.kind === kind).map((span) => span.seq);
  const parts = [["prefill", "prefill"], ["decode", "decode"], ["verify", "verify drafts"]].filter(([kind]) => step[kind]).map(([kind, word]) => `${names(of(kind))} ${word}${of(kind).length > 1 ? "" : "s"} ${plural(step[kind], "token")}`);
  const said = parts.join("; ") || "nothing runs";
  return `${said[0].toUpperCase()}${said.slice(1)}.`;
}

function detail(step, run) {
  const found = [h("h2", {}, `Step ${step.number}`, h("small", { class: "quiet" }, ` ${milliseconds(step.duration * 1000)}, ${plural(step.spans.length, "sequence")}, ${plural(step.tokens, "token")}`)), h("p", {}, sentence(step))];
  for (const each of step.admitted) found.push(h("p", { class: "event" }, `Admitted sequence ${each.seq}, ${each.cached ? `${plural(each.cached, "token")} of it cached` : "nothing of it cached"}${each.reason ? `: ${each.reason}` : ""}.`));
  for (const each of step.preempted) found.push(h("p", { class: "event bad" }, `Preempted sequence ${each.seq}: sequence ${each.for} needed its blocks. It will be computed again.`));
  if (step.waits) found.push(h("p", { class: "event" }, `The queue waits: ${WAITS[step.waits] || step.waits}.`));
  const measured = step.parts.filter(([, seconds]) => seconds > 0);
  if (measured.length > 1) {
    const kinds = { plan: "queue", run: "decode", commit: "prefill", render: "verify" };
    found.push(h("h3", {}, "Time"), splitBar(measured.map(([name, seconds]) => [name, seconds * 1000, kinds[name]]), milliseconds));
  }
  step.groups.forEach(([used, cached, free], i) => found.push(h("h3", {}, step.groups.length > 1 ? `KV cache, group ${i}` : "KV cache"), splitBar([["used", used, "used"], ["cached", cached, "cached"], ["free", free, "free"]], (value) => `${number(value)} blocks`)));
  return found;
}

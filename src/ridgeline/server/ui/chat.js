// Chat: a conversation, or continuations of texts for a model that cannot converse. Answers stream, and each says
// where its milliseconds went.

import { ServerError, events, post } from "./api.js";
import { bytes, button, field, h, milliseconds, number, plural } from "./dom.js";
import { markdown } from "./markdown.js";
import { splitBar } from "./charts.js";
import { entriesOf, tokenList } from "./tokens.js";

const TOP = 5;
const NEAR_END_PX = 120;
const EXAMPLES = {
  chat: ["Explain the KV cache to a new colleague.", "Write a haiku about memory bandwidth.", "What is 17 × 23? Think step by step."],
  code: ["def read_lines(path):\n", "class Stack:\n    def __init__(self):\n", "import os\n\ndef walk(folder):\n"],
  text: ["Once upon a time, there was", "The three laws of thermodynamics are"],
};

export function chat(server) {
  return new Conversation(server).page();
}

class Conversation {
  constructor(server) {
    this.server = server;
    this.converses = server.use === "chat";
    this.turns = [];
    this.running = null;
    this.log = h("div", { class: "log", role: "log", "aria-live": "off", "aria-label": this.converses ? "Conversation" : "Continuations" });
    this.said = h("p", { class: "sr", role: "status" });
    this.input = h("textarea", { id: "prompt", rows: 1, "aria-label": this.converses ? "Message" : "Text to continue", placeholder: this.converses ? "Ask something" : "Write the beginning of something" });
    this.go = h("button", { type: "submit", class: "primary go" }, this.converses ? "Send" : "Continue");
    this.settings = settings(server, this.converses);
  }

  page() {
    if (this.server.use === "embed") {
      return { element: h("div", { class: "hero" }, h("h1", {}, `${this.server.models[0]} does not write`), h("p", {}, `There is nothing to chat with: it gives vectors instead of tokens. `, h("code", {}, "POST /v1/embeddings"), " gives vectors of texts.")) };
    }
    this.input.addEventListener("input", () => fit(this.input));
    this.input.addEventListener("keydown", (event) => {
      const sends = event.key === "Enter" && !event.isComposing && (this.converses ? !event.shiftKey : event.ctrlKey || event.metaKey);
      if (!sends) return;
      event.preventDefault();
      if (!this.running) this.submit();
    });
    const composer = this.composer = h("form", { class: "composer" }, this.input, this.go, h("p", { class: "quiet hint" }, this.converses ? "Enter sends, Shift + Enter breaks the line, Esc stops." : "Ctrl + Enter continues, Esc stops."));
    composer.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.submit();
    });
    document.addEventListener("keydown", (event) => event.key === "Escape" && this.stop());
    this.hero = this.welcome();
    const element = h("div", { class: "chat" }, h("section", { class: "talk", "aria-label": "Chat" }, this.hero, this.log, this.said, composer), this.settings.element);
    const enter = () => { if (matchMedia("(pointer: fine)").matches) this.input.focus(); };
    return { element, enter, keeps: () => this.turns.length > 0 || this.input.value !== "" };
  }

  welcome() {
    const { models, max_model_len, weight_bytes, choices } = this.server;
    const name = models[0];
    const kind = this.converses ? "chat" : /python|code/i.test(name) ? "code" : "text";
    const facts = [plural(max_model_len, "token") + " of context", `${bytes(weight_bytes)} of weights`, choices.isa ? choices.isa.value : null].filter(Boolean);
    return h("div", { class: "hero" },
      h("h1", {}, this.converses ? `Talk to ${name}` : `Let ${name} go on`),
      this.converses ? null : h("p", { class: "note" }, `This model cannot hold a conversation: ${this.server.chat_template ? "its chat template tells no roles apart" : "it has no chat template"}. It continues what you write instead. `, h("code", {}, "--chat-template FILE"), ", or the name of one, gives a model a template."),
      h("p", { class: "quiet" }, facts.join(" · ")),
      h("div", { class: "examples" }, EXAMPLES[kind].map((text) => button(text.trimEnd(), () => { this.input.value = text; fit(this.input); this.submit(); }, { class: "example" }))));
  }

  submit() {
    const text = this.converses ? this.input.value.trim() : this.input.value;
    if (!text) return this.input.focus();
    this.input.value = "";
    fit(this.input);
    this.say(text);
  }

  say(text) {
    this.hero.hidden = true;
    const turn = { text };
    turn.element = this.question(turn);
    turn.answer = new Answer(this, turn);
    this.turns.push(turn);
    this.log.append(turn.element, turn.answer.element);
    this.staying(() => {}, true);
    this.run(turn);
  }

  question(turn) {
    const text = h("div", { class: this.converses ? "said" : "said mono" }, turn.text);
    const element = h("article", { class: "question", "aria-label": this.converses ? "You" : "Your text" }, text);
    const edit = button("Edit", () => {
      this.stop();
      const area = h("textarea", { "aria-label": "Edit the message", value: turn.text, class: this.converses ? "" : "mono" });
      const back = () => element.replaceChildren(text, actions);
      const send = () => {
        if (!area.value.trim()) return;
        this.cut(turn);
        this.say(area.value);
      };
      area.addEventListener("keydown", (event) => {
        if (event.key === "Escape") { event.stopPropagation(); back(); edit.focus(); }
        else if (event.key === "Enter" && (this.converses ? !event.shiftKey : event.ctrlKey)) { event.preventDefault(); send(); }
      });
      element.replaceChildren(area, h("div", { class: "actions" }, button("Send again", send, { class: "primary" }), button("Cancel", back)));
      fit(area);
      area.addEventListener("input", () => fit(area));
      area.focus();
    });
    const actions = h("div", { class: "actions" }, edit);
    element.append(actions);
    return element;
  }

  // Forget a turn and all that came after it.
  cut(turn) {
    const index = this.turns.indexOf(turn);
    if (index < 0) return;
    for (const gone of this.turns.splice(index)) {
      gone.element.remove();
      gone.answer.element.remove();
    }
  }

  again(turn) {
    const index = this.turns.indexOf(turn);
    if (index < 0) return;
    this.stop();
    for (const gone of this.turns.splice(index + 1)) { gone.element.remove(); gone.answer.element.remove(); }
    const answer = new Answer(this, turn);
    turn.answer.element.replaceWith(answer.element);
    turn.answer = answer;
    this.run(turn);
  }

  body(turn) {
    const { system, options, probabilities } = this.settings.read();
    const common = { model: this.server.models[0], ...options, stream: true, stream_options: { include_usage: true } };
    if (!this.converses) return { ...common, prompt: turn.text, ...(probabilities ? { logprobs: TOP } : {}) };
    const messages = system ? [{ role: "system", content: system }] : [];
    for (const { text, answer } of this.turns.slice(0, this.turns.indexOf(turn))) { // what got no answer, being too long, would be so again
      if (answer.text) messages.push({ role: "user", content: text }, { role: "assistant", content: answer.text });
    }
    messages.push({ role: "user", content: turn.text });
    return { ...common, messages, ...(probabilities ? { logprobs: true, top_logprobs: TOP } : {}) };
  }

  async run(turn) {
    const control = new AbortController();
    this.running = control;
    this.go.textContent = "Stop";
    this.go.classList.add("stop");
    const answer = turn.answer;
    try {
      const path = this.converses ? "v1/chat/completions" : "v1/completions";
      const body = this.body(turn);
      this.settings.last = [path, body];
      answer.begin();
      const response = await post(path, body, control.signal);
      for await (const event of events(response)) answer.take(event);
      this.staying(() => answer.finish());
    } catch (error) {
      this.staying(() => (error.name === "AbortError" ? answer.finish("stopped") : answer.fail(error)));
    } finally {
      if (this.running === control) {
        this.running = null;
        this.go.textContent = this.converses ? "Send" : "Continue";
        this.go.classList.remove("stop");
      }
      this.said.textContent = answer.summary;
    }
  }

  // Change an answer; who looks at the end of the talk, above what is written in, still does.
  staying(change, atEnd = this.below() < NEAR_END_PX) {
    change();
    if (atEnd) scrollBy(0, Math.max(0, this.below()));
  }

  below() {
    return this.log.getBoundingClientRect().bottom - this.composer.getBoundingClientRect().top;
  }

  stop() {
    this.running?.abort();
  }
}

class Answer {
  constructor(conversation, turn) {
    this.conversation = conversation;
    this.text = "";
    this.reasoning = "";
    this.calls = "";
    this.summary = "";
    this.timings = this.usage = this.reason = null;
    this.content = h("div", { class: conversation.converses ? "text" : "text mono" });
    this.thinking = h("div", { class: "text" });
    this.thought = h("details", { class: "thought", open: true, hidden: true }, h("summary", {}, "Reasoning"), this.thinking);
    this.tokens = tokenList();
    this.tokens.element.hidden = true;
    this.toggle = button("Token probabilities", () => this.show(this.tokens.element.hidden), { "aria-pressed": "false", hidden: true });
    this.times = h("div", { class: "times" });
    const actions = [this.toggle, button("Try again", () => conversation.again(turn))];
    if (navigator.clipboard) actions.push(copier("Copy", () => this.text));
    if (!conversation.converses) actions.push(button("Go on from here", () => conversation.say(turn.text + this.text)));
    this.actions = h("div", { class: "actions", hidden: true }, actions);
    this.element = h("article", { class: "answer", "aria-label": conversation.server.models[0], "aria-busy": "true" }, this.thought, this.content, this.tokens.element, this.times, this.actions);
  }

  begin() {
    this.began = performance.now();
    this.content.append(h("span", { class: "waiting", role: "img", "aria-label": "waiting for the first token" }));
  }

  show(asTokens) {
    this.tokens.element.hidden = !asTokens;
    this.content.hidden = asTokens;
    this.toggle.setAttribute("aria-pressed", String(asTokens));
  }

  take(event) {
    if (event.usage) this.usage = event.usage;
    const choice = event.choices[0];
    if (!choice) return;
    const delta = choice.delta || { content: choice.text };
    if (delta.content || delta.reasoning_content || delta.tool_calls) this.first ??= performance.now();
    this.text += delta.content || "";
    this.reasoning += delta.reasoning_content || "";
    for (const call of delta.tool_calls || []) this.calls += call.function.name ? `${call.function.name} ` : call.function.arguments || "";
    const entries = entriesOf(choice.logprobs);
    if (entries.length) {
      this.tokens.add(entries);
      this.toggle.hidden = false;
    }
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (choice.timings) this.timings = choice.timings;
    this.due ??= requestAnimationFrame(() => this.conversation.staying(() => this.draw()));
  }

  draw() {
    this.due = null;
    if (this.conversation.converses) this.content.replaceChildren(...markdown(this.text));
    else this.content.replaceChildren(this.text);
    if (this.calls) this.content.append(h("pre", { tabindex: "0", "aria-label": "Tool call" }, h("code", {}, this.calls)));
    this.thought.hidden = !this.reasoning;
    if (this.reasoning) this.thinking.replaceChildren(...markdown(this.reasoning));
    if (!this.timings && this.first) this.times.replaceChildren(h("p", { class: "quiet" }, this.seen()));
  }

  // What this browser saw, while the server has not said it yet.
  seen() {
    const count = this.tokens.count;
    const speed = count > 1 ? ` · ${number((count - 1) / ((performance.now() - this.first) / 1000))} tokens/s` : "";
    return `first token after ${milliseconds(this.first - this.began)}${count ? ` · ${plural(count, "token")}` : ""}${speed}, as seen here`;
  }

  end() {
    if (this.due) cancelAnimationFrame(this.due);
    this.draw();
    this.element.setAttribute("aria-busy", "false");
    this.actions.hidden = false;
    if (this.reasoning && this.text) this.thought.open = false;
  }

  finish(how = "") {
    this.end();
    if (!this.text && !this.reasoning && !this.calls) this.content.replaceChildren(h("p", { class: "quiet" }, how ? "Stopped before the first token." : "The model ended its answer at once, without a word."));
    if (this.timings) {
      this.times.replaceChildren(...milestones(this.timings, this.usage, this.reason));
      this.summary = `Answer complete, ${plural(this.usage?.completion_tokens ?? 0, "token")} in ${milliseconds(this.timings.latency_ms)}.`;
    } else {
      this.times.replaceChildren(h("p", { class: "quiet" }, h("strong", {}, "Stopped."), this.first ? ` ${this.seen()}` : ""));
      this.summary = "Stopped.";
    }
  }

  fail(error) {
    this.end();
    const id = error instanceof ServerError && error.id ? h("span", { class: "quiet" }, ` ${error.status} · ${error.id}`) : null;
    if (!this.text) this.content.replaceChildren();
    this.times.replaceChildren(h("div", { class: "error", role: "alert" }, error.message, id));
    this.summary = "";
  }
}

// The milliseconds of an answer as the engine counted them.
function milestones(timings, usage, reason) {
  const { queue_ms, ttft_ms, tpot_ms, latency_ms } = timings;
  const count = usage?.completion_tokens ?? 0;
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  const figures = [
    ["TTFT", milliseconds(ttft_ms), "Time to first token"],
    ["TPOT", milliseconds(tpot_ms), "Time per output token after the first"],
    ["speed", tpot_ms ? `${number(1000 / tpot_ms)} tokens/s` : "–", "Tokens per second after the first"],
    ["total", milliseconds(latency_ms), "Arrival to last token"],
    ["tokens", `${usage?.prompt_tokens ?? "–"} in, ${count} out${cached ? `, ${cached} cached` : ""}`, "Tokens of prompt and answer; cached ones were not computed again"],
  ];
  if (timings.draft_n) figures.push(["drafts", `${timings.draft_n_accepted} of ${timings.draft_n} accepted`, "Drafted tokens that were verified"]);
  if (timings.num_preemptions) figures.push(["preempted", plural(timings.num_preemptions, "time"), "Sent back to the queue for lack of KV cache"]);
  if (reason === "length") figures.push(["cut", "at max tokens", "The answer reached the limit of tokens"]);
  const first = ttft_ms ?? latency_ms;
  return [
    splitBar([["queue", queue_ms, "queue"], ["prefill", first - queue_ms, "prefill"], ["decode", latency_ms - first, "decode"]], milliseconds),
    h("dl", { class: "figures" }, figures.map(([name, value, help]) => h("div", { title: help }, h("dt", {}, name), h("dd", {}, value)))),
  ];
}

function settings(server, converses) {
  const defaults = server.generation;
  const input = (value, placeholder, attributes) => h("input", { type: "number", inputmode: "decimal", step: "any", value, placeholder, ...attributes });
  const controls = {
    max_tokens: input(String(Math.min(converses ? 512 : 128, Math.ceil(server.max_model_len / 4))), "as many as fit", { step: 1, min: 1 }),
    temperature: input(defaults.temperature === null ? "0.7" : "", `${defaults.temperature ?? 1}, the default`, { min: 0 }),
    top_p: input("", `${defaults.top_p ?? 1}, the default`, { min: 0, max: 1 }),
    seed: input("", "any", { step: 1 }),
  };
  const system = h("textarea", { rows: 3, placeholder: "none" });
  const probabilities = h("input", { type: "checkbox", checked: true, id: "probabilities" });
  const curl = navigator.clipboard ? copier("Copy the last request as curl", () => asCurl(found.last)) : null;
  const found = {
    last: null,
    read() {
      const options = {};
      for (const [name, control] of Object.entries(controls)) if (control.value !== "") options[name] = Number(control.value);
      return { system: system.value.trim(), options, probabilities: probabilities.checked };
    },
    element: h("aside", { class: "panel", "aria-label": "Settings" }, h("details", { open: matchMedia("(min-width: 60rem)").matches }, h("summary", {}, "Settings"),
      converses && field("System prompt", system),
      field("Max tokens", controls.max_tokens),
      field("Temperature", controls.temperature, "0 always takes the likeliest token."),
      field("Top p", controls.top_p),
      field("Seed", controls.seed, "The same seed and request give the same answer."),
      h("div", { class: "check" }, probabilities, h("label", { for: "probabilities" }, "Ask for token probabilities")),
      h("p", { class: "quiet" }, `Each token then brings its ${TOP} likeliest rivals, which costs a little time.`),
      curl)),
  };
  return found;
}

function asCurl(last) {
  if (!last) return "";
  const json = JSON.stringify({ ...last[1], stream: false, stream_options: undefined });
  return `curl -s ${url(last[0])} -H 'Content-Type: application/json' -d '${json.replaceAll("'", "'\\''")}'`;
}

function copier(label, text) {
  const made = button(label, async () => {
    const value = text();
    if (!value) return;
    await navigator.clipboard.writeText(value);
    made.textContent = "Copied";
    setTimeout(() => { made.textContent = label; }, 1500);
  });
  return made;
}

function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, innerHeight * 0.4)}px`;
}

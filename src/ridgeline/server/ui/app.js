// The frame: which page is shown, whether the server answers, and what it serves.

import { get } from "./api.js";
import { $, h } from "./dom.js";
import { chat } from "./chat.js";
import { learn } from "./learn.js";
import { live } from "./live.js";
import { numbers } from "./numbers.js";
import { steps } from "./steps.js";

const PAGES = [["chat", "Chat", chat], ["live", "Live", live], ["steps", "Steps", steps], ["learn", "Learn", learn], ["numbers", "Numbers", numbers]];
const CHECK_MS = 5000;
const shown = new Map();
let server = null;
let leave = () => {};

function navigate() {
  const name = location.hash.slice(1).split("/")[0];
  if (name === "main") return;
  const [id, title, page] = PAGES.find(([known]) => known === name) || PAGES[0];
  leave();
  for (const link of $("nav").children) {
    if (link.getAttribute("href") === `#${id}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!shown.has(id)) shown.set(id, page(server));
  const { element, enter } = shown.get(id);
  document.title = `${title} · ${server.models[0]} · Ridgeline`;
  $("main").replaceChildren(element);
  $("main").className = `page-${id}`;
  leave = (enter && enter()) || (() => {});
}

function show(alive, words) {
  $("dot").className = alive ? "dot up" : "dot down";
  $("served").textContent = words;
}

async function check() {
  try {
    await fetch(new URL("../ready", import.meta.url), { credentials: "omit" }).then((r) => r.ok || Promise.reject(r));
    show(true, server.models[0]);
    $("banner").hidden = true;
  } catch (problem) {
    const stopping = problem instanceof Response;
    show(false, stopping ? "stopping" : "no answer");
    $("banner").textContent = stopping ? "The server is shutting down: it takes no new requests." : "The server does not answer. This page goes on when it does.";
    $("banner").hidden = false;
  }
}

async function start() {
  for (const [id, title] of PAGES) $("nav").append(h("a", { href: `#${id}` }, title));
  for (;;) {
    try {
      server = await get("explain/server");
      break;
    } catch (error) {
      show(false, "no answer");
      $("main").replaceChildren(h("p", { class: "banner", role: "alert" }, error.message));
      await new Promise((resolve) => setTimeout(resolve, CHECK_MS));
    }
  }
  show(true, server.models[0]);
  addEventListener("hashchange", () => { navigate(); $("main").focus({ preventScroll: true }); scrollTo(0, 0); });
  navigate();
  setInterval(() => document.hidden || check(), CHECK_MS);
}

start();

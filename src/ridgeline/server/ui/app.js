// The frame: which page is shown, whether the server answers, and what it serves.

import { get, url } from "./api.js";
import { $, h } from "./dom.js";
import { chat } from "./chat.js";
import { doctor } from "./doctor.js";
import { learn } from "./learn.js";
import { live } from "./live.js";
import { numbers } from "./numbers.js";
import { plan } from "./plan.js";
import { request } from "./request.js";
import { steps } from "./steps.js";

const WATCH = [["chat", "Chat", chat], ["live", "Live", live]]; // with a server alone
const READ = [["request", "Request", request], ["steps", "Steps", steps], ["doctor", "Doctor", doctor], ["plan", "Plan", plan], ["learn", "Learn", learn], ["numbers", "Numbers", numbers]];
const CHECK_MS = 5000;
let pages = [...WATCH, ...READ];
const shown = new Map();
let server = null;
let leave = () => {};

function navigate() {
  const name = location.hash.slice(1).split("/")[0];
  if (name === "main") return;
  const [id, title, page] = pages.find(([known]) => known === name) || pages.at(server.use === "files" ? -2 : 0);
  leave();
  for (const link of $("nav").children) {
    link.removeAttribute("aria-current");
    if (link.getAttribute("href") !== `#${id}`) continue;
    link.setAttribute("aria-current", "page");
    link.scrollIntoView({ block: "nearest", inline: "center" });
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

// Another server is behind the address: pages are made anew, but for what somebody wrote, which goes on with its model.
function renew(found) {
  Object.assign(server, found);
  for (const [id, page] of shown) if (!page.keeps || !page.keeps()) shown.delete(id);
  navigate();
}

async function check() {
  try {
    await fetch(url("ready"), { credentials: "omit" }).then((r) => r.ok || Promise.reject(r));
    const found = await get("explain/server");
    if (JSON.stringify(found) !== JSON.stringify(server)) renew(found);
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
  if (server.use === "files") pages = READ;
  for (const [id, title] of pages) $("nav").append(h("a", { href: `#${id}` }, title));
  show(true, server.models[0]);
  addEventListener("hashchange", () => { navigate(); $("main").focus({ preventScroll: true }); scrollTo(0, 0); });
  navigate();
  if (server.use !== "files") setInterval(() => document.hidden || check(), CHECK_MS);
}

start();

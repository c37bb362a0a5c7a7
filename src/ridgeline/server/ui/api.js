// The server behind these pages: requests with the key, errors in its own words, streams of events.

import { $ } from "./dom.js";

const BASE = new URL("..", import.meta.url);
export const url = (path) => new URL(path, BASE);
let key = "";
let asking = null;

export class ServerError extends Error {
  constructor(message, status = 0, id = "") {
    super(message);
    this.status = status;
    this.id = id;
  }
}

export async function request(path, options = {}) {
  for (;;) {
    const sent = key;
    const headers = { ...options.headers, ...(sent ? { authorization: `Bearer ${sent}` } : {}) };
    let response;
    try {
      response = await fetch(url(path), { ...options, headers, credentials: "omit", referrerPolicy: "no-referrer" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The server cannot be reached. Is it still running?");
    }
    if (response.ok) return response;
    const message = await words(response);
    if (response.status === 401) {
      if (key === sent) await askForKey(sent ? message : "");
      continue;
    }
    throw new ServerError(message, response.status, response.headers.get("x-request-id") || "");
  }
}

async function words(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}

export const get = async (path, signal) => (await request(path, { signal })).json();

export function post(path, body, signal) {
  return request(path, { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal });
}

// Ask once, whoever needs the key; resolve when there is one.
function askForKey(problem) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key");
    $("key-error").textContent = problem;
    $("key-input").value = "";
    dialog.oncancel = (event) => event.preventDefault();
    dialog.onclose = () => {
      const given = $("key-input").value.trim();
      if (!given) return dialog.showModal();
      key = given;
      $("key-input").value = "";
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

// Yield the data of server-sent events until [DONE]. An error event is thrown in the server's words.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ServerError("The connection broke before the answer was complete.");
    }
    if (part.done) throw new ServerError("The server ended the connection before the answer was complete.");
    rest += part.value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      const block = rest.slice(0, end);
      rest = rest.slice(end + 2);
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue;
      const message = JSON.parse(data);
      if (message.error) throw new ServerError(message.error.message);
      yield message;
    }
  }
}

// What models write, as nodes: fences, headings, lists, quotes, tables, emphasis, code, links. Never as HTML: whatever
// is not one of these stays text.

import { h } from "./dom.js";

const INLINE = /(`+)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=[^\s*])([^*\n]*[^\s*])\*|\[([^\]\n]*)\]\((https?:\/\/[^\s()]+)\)/g;
const MAX_DEPTH = 4;

export function inline(text, depth = 0) {
  const nodes = [];
  let at = 0;
  for (const match of depth < MAX_DEPTH ? text.matchAll(INLINE) : []) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    const [all, , code, strong, slanted, label, address] = match;
    if (code !== undefined) nodes.push(h("code", {}, code));
    else if (strong !== undefined) nodes.push(h("strong", {}, inline(strong, depth + 1)));
    else if (slanted !== undefined) nodes.push(h("em", {}, inline(slanted, depth + 1)));
    else nodes.push(h("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank" }, label || address));
    at = match.index + all.length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

export function markdown(text) {
  const lines = text.split("\n");
  const nodes = [];
  let paragraph = [];
  const flush = () => {
    if (paragraph.length) nodes.push(h("p", {}, inline(paragraph.join("\n"))));
    paragraph = [];
  };
  const take = (index, pattern) => {
    const found = [];
    for (; index < lines.length && pattern.test(lines[index]); index++) found.push(lines[index]);
    return found;
  };
  for (let i = 0; i < lines.length; ) {
    const line = lines[i];
    const fence = /^\s*(```+|~~~+)\s*([\w+#.-]*)/.exec(line);
    if (fence) {
      flush();
      const body = [];
      for (i++; i < lines.length && !lines[i].trimStart().startsWith(fence[1]); i++) body.push(lines[i]);
      i++;
      nodes.push(h("pre", { tabindex: "0", "aria-label": fence[2] ? `Code, ${fence[2]}` : "Code" }, h("code", {}, body.join("\n"))));
    } else if (/^#{1,6} /.test(line)) {
      flush();
      nodes.push(h("h3", { class: "said" }, inline(line.replace(/^#+ /, ""))));
      i++;
    } else if (/^\s*([-*+]|\d{1,9}[.)]) /.test(line)) {
      flush();
      const ordered = /^\s*\d/.test(line);
      const items = take(i, ordered ? /^\s*\d{1,9}[.)] / : /^\s*[-*+] /);
      const start = ordered ? parseInt(line.trim(), 10) : null;
      nodes.push(h(ordered ? "ol" : "ul", start > 1 ? { start } : {}, items.map((item) => h("li", {}, inline(item.replace(/^\s*([-*+]|\d{1,9}[.)]) /, ""))))));
      i += items.length;
    } else if (/^> ?/.test(line)) {
      flush();
      const quoted = take(i, /^> ?/);
      nodes.push(h("blockquote", {}, inline(quoted.map((each) => each.replace(/^> ?/, "")).join("\n"))));
      i += quoted.length;
    } else if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[i + 1] || "") && (lines[i + 1] || "").includes("|")) {
      flush();
      const rows = take(i + 2, /\|/);
      nodes.push(h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table" }, h("table", {},
        h("thead", {}, h("tr", {}, cells(line).map((cell) => h("th", {}, inline(cell))))),
        h("tbody", {}, rows.map((row) => h("tr", {}, cells(row).map((cell) => h("td", {}, inline(cell)))))))));
      i += 2 + rows.length;
    } else {
      if (line.trim()) paragraph.push(line);
      else flush();
      i++;
    }
  }
  flush();
  return nodes;
}

// The list of notices, newest first. Screen readers announce only coloured ones.

import { $, el } from "./dom.js";
import { clock } from "./format.js";

let shown = new Map();
let first = true;

export function showNotices(notices) {
  $("events-empty").hidden = notices.length > 0;
  const list = $("events");
  const kept = new Map();
  notices.forEach((notice, i) => {
    let item = shown.get(notice.id);
    if (!item) {
      item = el("li", { class: notice.style }, el("time", { datetime: new Date(notice.t * 1000).toISOString() }, clock(notice.t)), el("span", {}, notice.text));
      if (!first && notice.style !== "plain") announce(notice.text);
    }
    kept.set(notice.id, item);
    if (list.children[i] !== item) list.insertBefore(item, list.children[i] ?? null);
  });
  while (list.childElementCount > notices.length) list.lastElementChild.remove();
  shown = kept;
  first = false;
}

function announce(text) {
  $("announcer").replaceChildren(el("p", {}, text));
}

// What happened, newest first. Only what is remarkable is read out.

import { $, el } from "./dom.js";
import { clock } from "./format.js";

let shown = new Map();
let first = true;

export function showEvents(happenings) {
  $("events-empty").hidden = happenings.length > 0;
  const list = $("events");
  const kept = new Map();
  happenings.forEach((told, i) => {
    let item = shown.get(told.id);
    if (!item) {
      item = el("li", { class: told.style }, el("time", { datetime: new Date(told.t * 1000).toISOString() }, clock(told.t)), el("span", {}, told.text));
      if (!first && told.style !== "plain") announce(told.text);
    }
    kept.set(told.id, item);
    if (list.children[i] !== item) list.insertBefore(item, list.children[i] ?? null);
  });
  while (list.childElementCount > happenings.length) list.lastElementChild.remove();
  shown = kept;
  first = false;
}

function announce(text) {
  $("announcer").replaceChildren(el("p", {}, text));
}

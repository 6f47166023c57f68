// Who took part in which round, as a table that screen readers can read.

import { colour } from "./colours.js";
import { $, el, setText } from "./dom.js";
import { ago, clock, decimal } from "./format.js";

const SHOWN = 60;
const WORDS = { by: "contributed", late: "late", skipped: "skipped", absent: "left out", none: "offline" };

let drawn = "";

export function showRounds(all, overview) {
  const rounds = all.slice(-SHOWN);
  $("rounds-empty").hidden = rounds.length > 0;
  $("rounds").hidden = rounds.length === 0;
  if (!overview || rounds.length === 0) return;
  const last = rounds.at(-1);
  setText($("last-round"), describe(last, overview.now));
  const involved = new Set(rounds.flatMap((round) => [...round.by, ...round.late, ...round.absent, ...Object.keys(round.skipped).map(Number)]));
  const known = overview.peers.filter((peer) => involved.has(peer.n)).map((peer) => peer.n);
  const unknown = [...involved].filter((who) => typeof who === "string").sort();
  const people = [...known, ...unknown];
  const signature = JSON.stringify([rounds, people, colour(1)]);
  if (signature === drawn) return;
  drawn = signature;

  const box = $("rounds");
  const atEnd = box.scrollLeft + box.clientWidth >= box.scrollWidth - 40;
  const head = el("tr", {}, el("th", { scope: "col", class: "corner" }, "round"), ...rounds.map((round, i) => headCell(round, i, rounds)));
  const body = people.map((who) => {
    const name = typeof who === "number" ? `peer ${who}` : who;
    const label = el("th", { scope: "row" }, el("span", { class: "swatch", "aria-hidden": "true" }), name);
    if (typeof who === "number") label.firstChild.style.background = colour(who);
    return el("tr", {}, label, ...rounds.map((round) => bodyCell(round, who, name)));
  });
  box.replaceChildren(el("table", { class: "timeline" }, el("caption", { class: "visually-hidden" }, "Who took part in which round"), el("thead", {}, head), el("tbody", {}, ...body)));
  if (atEnd) box.scrollLeft = box.scrollWidth;
}

function headCell(round, i, rounds) {
  const shown = i === rounds.length - 1 || (round.round % 5 === 0 && i < rounds.length - 2);
  return el("th", { scope: "col", class: round.agreed ? round.status : "differ", title: describe(round) },
    el("span", { class: shown ? "" : "visually-hidden" }, String(round.round)));
}

function bodyCell(round, who, name) {
  const part = round.by.includes(who) ? "by" : round.late.includes(who) ? "late" : Object.hasOwn(round.skipped, who) ? "skipped" : round.absent.includes(who) ? "absent" : "none";
  const why = part === "skipped" ? `: ${round.skipped[who]}` : "";
  return el("td", { title: `round ${round.round}, ${name}: ${WORDS[part]}${why}` },
    el("span", { class: `cell ${part}` }), el("span", { class: "visually-hidden" }, WORDS[part]));
}

function describe(round, now) {
  const when = now === undefined ? `at ${clock(round.t)}` : ago(now - round.t);
  if (round.status === "skipped") return `round ${round.round} skipped ${when}`;
  const who = round.status === "solo" ? "by one peer alone" : `by ${round.by.length} peers in ${decimal(round.wall_s, 1)} s`;
  return `round ${round.round} ${round.status === "solo" ? "taken" : "committed"} ${who}, ${when} · ${round.agreed ? "all states equal" : "STATES DIFFER"}`;
}

// The summary tiles, the table of peers, and the bytes panel.

import { colour } from "./colours.js";
import { $, el, setText } from "./dom.js";
import { ago, compact, decimal, integer, size } from "./format.js";

const REASONS = {
  epoch: "from another round", too_old: "too old", superseded: "superseded", clipped: "too far off", newcomer: "of a newcomer",
  inbox_full: "inbox full",
  lost: "lost", shed: "link too slow", not_finite: "not finite", failed: "failed",
};

export function showTiles(o) {
  const length = o.total_steps ? ` of ${integer(o.total_steps)}` : "";
  const dense = ratio(o.bytes);
  const tiles = [
    ["Peers", integer(o.up), o.seen > o.up ? `${o.seen} seen so far` : "training"],
    ["Step", integer(o.step), length ? length.trim() : "no end"],
    ["Loss", decimal(o.loss, 3), o.held_out == null ? "nats, training" : `nats · held-out ${decimal(o.held_out, 3)}`],
    ["Speed", compact(o.tokens_per_s), "tokens/s, all peers"],
    ["Rounds", integer(o.rounds), o.rounds ? (o.agreed ? "so far, states equal" : "STATES DIFFER") : "committed"],
    ["Correlation", decimal(o.correlation, 4), o.spread == null ? "of the weights" : `of the weights; anchors ${decimal(100 * o.spread, 1)} % apart`],
    ["Bytes", dense ? `1/${compact(dense)}` : "–", "of dense data parallel"],
  ];
  const list = $("tiles");
  if (list.childElementCount !== tiles.length) {
    list.replaceChildren(...tiles.map(() => el("div", {}, el("dt"), el("dd"), el("dd", { class: "sub" }))));
  }
  tiles.forEach(([name, value, sub], i) => {
    const [dt, dd, small] = list.children[i].children;
    setText(dt, name);
    setText(dd, value);
    setText(small, sub);
  });
  list.children[1].style.setProperty("--done", o.total_steps ? String(Math.min(1, o.step / o.total_steps)) : "0");
  list.children[4].classList.toggle("bad", !o.agreed);
}

const ratio = (bytes) => {
  const sent = bytes.fragments + bytes.rounds;
  return bytes.dense > 0 && sent > 0 ? Math.round(bytes.dense / sent) : 0;
};

const rows = new Map();

export function showPeers(o, charts) {
  const body = $("peers").tBodies[0];
  $("peers-empty").hidden = o.peers.length > 0;
  $("peers").parentElement.hidden = o.peers.length === 0;
  const order = [...o.peers].sort((a, b) => isHere(b) - isHere(a) || a.n - b.n);
  for (const [n, row] of rows) {
    if (!o.peers.some((peer) => peer.n === n)) { row.remove(); rows.delete(n); }
  }
  order.forEach((peer, i) => {
    if (!rows.has(peer.n)) rows.set(peer.n, makeRow());
    const row = rows.get(peer.n);
    if (body.children[i] !== row) body.insertBefore(row, body.children[i] ?? null);
    fillRow(row, peer, o.now);
  });
  charts.legend(order);
}

const isHere = (peer) => peer.kind === "training" || peer.kind === "joining" || peer.kind === "finished";

const LABELS = ["", "now", "step", "loss", "held-out", "tokens/s", "exchange ms", "fragments", "skipped", "sent", "round trip ms"];

// Explicit roles: on phones the rows become cards, and browsers then no longer treat them as a table.
function makeRow() {
  const cells = LABELS.map((label, i) => (i === 0
    ? el("th", { scope: "row", role: "rowheader" }, el("span", { class: "swatch", "aria-hidden": "true" }), el("span", { class: "n" }), el("code"))
    : el("td", { "data-label": label, role: "cell", class: i === 1 || i === 8 ? "" : "num" })));
  cells[1].append(el("span", { class: "status" }), el("span", { class: "doing" }));
  return el("tr", { role: "row" }, ...cells);
}

function fillRow(row, peer, now) {
  row.dataset.kind = peer.kind;
  row.dataset.peer = peer.id;
  const [name, doing, ...rest] = row.cells;
  name.title = peer.id;
  name.children[0].style.background = colour(peer.n);
  setText(name.children[1], `peer ${peer.n}`);
  setText(name.children[2], peer.short + (peer.founded ? " · founder" : ""));
  setText(doing.children[0], status(peer, now));
  setText(doing.children[1], peer.trouble || (isHere(peer) && peer.doing !== peer.kind ? peer.doing : ""));
  const skipped = Object.entries(peer.skipped);
  const total = skipped.reduce((sum, [, count]) => sum + count, 0);
  const texts = [
    integer(peer.step), decimal(peer.loss, 3), decimal(peer.held_out, 3),
    peer.kind === "training" ? integer(peer.tokens_per_s) : "–", decimal(peer.exchange_ms, 1),
    `${compact(peer.sent)} / ${compact(peer.merged)}`,
    total ? `${compact(total)}: ${skipped.map(([reason, count]) => `${compact(count)} ${Object.hasOwn(REASONS, reason) ? REASONS[reason] : reason}`).join(", ")}` : "none",
    size(peer.fragment_bytes + peer.round_bytes), decimal(peer.rtt_ms, 1),
  ];
  texts.forEach((text, i) => setText(rest[i], text));
  rest[7].title = `fragments ${size(peer.fragment_bytes)}, rounds ${size(peer.round_bytes)}`;
}

function status(peer, now) {
  if (peer.kind === "gone") return `gone, last heard ${ago(now - peer.heard)}`;
  if (peer.kind === "left") return `left ${ago(now - peer.heard)}`;
  if (peer.kind === "unreachable") return peer.doing || "unreachable";
  return peer.kind;
}

export function showBytes(o) {
  const { fragments, rounds, dense, sent, steps } = o.bytes;
  const known = steps > 0 && fragments + rounds > 0;
  $("bytes-empty").hidden = known;
  $("bytes").hidden = !known;
  if (!known) return;
  const bars = [["fragments", fragments], ["rounds", rounds], ["this run in all", fragments + rounds], ["dense data parallel", dense]];
  const box = $("bytes");
  if (!box.childElementCount) {
    box.append(
      el("dl", { class: "bars" }, ...bars.flatMap(([name]) => [el("dt", {}, name), el("dd", {}, el("span", { class: "bar" }), el("b"))])),
      el("p", { class: "note ticks", "aria-hidden": "true" }),
      el("p", { class: "claim" }),
    );
  }
  const most = Math.ceil(Math.log10(Math.max(...bars.map(([, value]) => value), 1000)));
  const least = Math.min(2, most - 1);
  bars.forEach(([, value], i) => {
    const dd = box.children[0].children[2 * i + 1];
    const share = value > 0 ? (Math.log10(value) - least) / (most - least) : 0;
    dd.children[0].style.width = `${Math.max(0.5, Math.min(100, 100 * share)).toFixed(1)}%`;
    setText(dd.children[1], value > 0 ? size(value) : "–");
  });
  setText(box.children[1], `logarithmic scale from ${size(10 ** least)} to ${size(10 ** most)}`);
  const times = ratio(o.bytes);
  setText(box.children[2], times
    ? `Dense data-parallel training would send ${integer(times)} times as much, and wait for it: ring all-reduce of fp32 gradients `
      + `at every step, 2(k−1)/k · 4N bytes with k = ${o.up} peers and N = ${integer(o.parameters)} weights. Sent so far: ${size(sent)}.`
    : `Sent so far: ${size(sent)}. The comparison needs at least two peers.`);
}

// The swarm: peers on a circle, and the fragments sent between them.

import { colour } from "./colours.js";
import { $, setText, svg } from "./dom.js";
import { compact } from "./format.js";

const CENTRE = [200, 170];
const RADII = [145, 128];
// How long lost peers stay visible.
const FADE_S = 180;
// Most dots at a time; at low rates each dot is one fragment.
const MOST_DOTS = 80;
const FLIGHT_MS = 1100;
const DOTS_PER_S = 1.5;
// Pairs of peers without a direct connection that are listed.
const MOST_WAYS = 6;

export class Graph {
  constructor(root) {
    this.root = root;
    this.edges = svg("g", { class: "edges" });
    this.dots = svg("g", { class: "dots" });
    this.nodes = svg("g", { class: "nodes" });
    root.append(this.edges, this.dots, this.nodes);
    this.peers = new Map();
    this.lines = new Map();
    this.flying = [];
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    this.last = 0;
    requestAnimationFrame((now) => this.tick(now));
  }

  update(overview) {
    const shown = overview.peers.filter((peer) => ["training", "joining", "finished", "unreachable"].includes(peer.kind) || overview.now - peer.heard < FADE_S);
    $("swarm-empty").hidden = shown.length > 0;
    this.root.classList.toggle("blank", shown.length === 0);
    this.place(shown);
    this.link(shown);
    const rate = shown.reduce((sum, peer) => sum + Object.values(peer.to).reduce((a, b) => a + b, 0), 0);
    setText($("traffic"), shown.length ? `${compact(Math.round(rate))} fragments/s` : "");
    setText($("ways"), ways(overview));
    const training = shown.filter((peer) => peer.kind === "training").length;
    this.root.setAttribute("aria-label", `${shown.length} peers, ${training} of them training; ${Math.round(rate)} fragments per second between them`);
  }

  place(shown) {
    const kept = new Set(shown.map((peer) => peer.n));
    for (const [n, node] of this.peers) {
      if (!kept.has(n)) { node.group.remove(); this.peers.delete(n); }
    }
    const size = shown.length > 16 ? 9 : shown.length > 8 ? 13 : 17;
    shown.forEach((peer, i) => {
      const angle = -Math.PI / 2 + (2 * Math.PI * i) / shown.length;
      const alone = shown.length === 1;
      const at = alone ? CENTRE : [CENTRE[0] + RADII[0] * Math.cos(angle), CENTRE[1] + RADII[1] * Math.sin(angle)];
      let node = this.peers.get(peer.n);
      if (!node) {
        const group = svg("g", {}, svg("circle", { class: "ring" }), svg("circle", { class: "body" }), svg("text", {}), svg("title"));
        this.nodes.append(group);
        node = { group };
        this.peers.set(peer.n, node);
      }
      const [ring, body, label, title] = node.group.children;
      node.at = at;
      node.group.setAttribute("transform", `translate(${at[0].toFixed(1)} ${at[1].toFixed(1)})`);
      node.group.setAttribute("class", `${peer.kind}${/^round/.test(peer.doing) ? " in-round" : ""}`);
      ring.setAttribute("r", size + 4.5);
      body.setAttribute("r", size);
      body.setAttribute("fill", colour(peer.n));
      body.setAttribute("stroke", colour(peer.n));
      label.setAttribute("font-size", size > 10 ? 13 : 9.5);
      setText(label, String(peer.n));
      setText(title, `peer ${peer.n} (${peer.short}): ${peer.kind === "training" ? peer.doing : peer.kind}`);
    });
  }

  link(shown) {
    const rates = new Map();
    for (const peer of shown) {
      for (const [to, rate] of Object.entries(peer.to)) {
        const other = Number(to);
        if (!this.peers.has(other) || other === peer.n) continue;
        const key = peer.n < other ? `${peer.n}-${other}` : `${other}-${peer.n}`;
        const line = rates.get(key) ?? { ends: [Math.min(peer.n, other), Math.max(peer.n, other)], total: 0, flows: [] };
        line.total += rate;
        line.flows.push({ from: peer.n, to: other, rate });
        rates.set(key, line);
      }
    }
    for (const [key, line] of this.lines) {
      if (!rates.has(key)) { line.node.remove(); this.lines.delete(key); }
    }
    for (const [key, { ends, total, flows }] of rates) {
      let line = this.lines.get(key);
      if (!line) {
        line = { node: svg("line"), due: new Map() };
        this.edges.append(line.node);
        this.lines.set(key, line);
      }
      line.flows = flows;
      const [a, b] = ends.map((n) => this.peers.get(n).at);
      const attributes = { x1: a[0], y1: a[1], x2: b[0], y2: b[1], "stroke-width": Math.min(4, 0.6 + 0.9 * Math.log2(1 + total)) };
      for (const [name, value] of Object.entries(attributes)) line.node.setAttribute(name, value.toFixed(1));
    }
  }

  tick(now) {
    const elapsed = Math.min(200, now - this.last) / 1000;
    this.last = now;
    if (!document.hidden && !this.calm.matches) {
      const most = this.lines.size > 60 ? 0.25 : 1;
      for (const line of this.lines.values()) {
        for (const flow of line.flows) {
          const per_s = Math.min(DOTS_PER_S, flow.rate) * most;
          if (Math.random() < per_s * elapsed && this.flying.length < MOST_DOTS) this.launch(flow, now);
        }
      }
    }
    this.flying = this.flying.filter((dot) => this.move(dot, now));
    requestAnimationFrame((next) => this.tick(next));
  }

  launch({ from, to }, now) {
    const node = svg("circle", { r: 2.6, fill: colour(from) });
    this.dots.append(node);
    this.flying.push({ node, from, to, start: now });
  }

  move(dot, now) {
    const share = (now - dot.start) / FLIGHT_MS;
    const a = this.peers.get(dot.from)?.at, b = this.peers.get(dot.to)?.at;
    if (share >= 1 || !a || !b) { dot.node.remove(); return false; }
    dot.node.setAttribute("cx", (a[0] + (b[0] - a[0]) * share).toFixed(1));
    dot.node.setAttribute("cy", (a[1] + (b[1] - a[1]) * share).toFixed(1));
    return true;
  }
}

// How rounds and state travel between the peers that are here.
function ways({ up, relayed }) {
  if (up < 2) return "";
  const exceptions = relayed.slice(0, MOST_WAYS).map(({ pair: [a, b], relay }) => `peers ${a} and ${b}: ${relay ? `relayed through ${relay}` : "libp2p carries rounds and state"}`);
  if (relayed.length > MOST_WAYS) exceptions.push(`${relayed.length - MOST_WAYS} more pairs`);
  return exceptions.length ? `Without a direct connection: ${exceptions.join("; ")}.` : "Rounds and state take direct connections.";
}

// Loss and correlation over time, as uPlot charts and as tables.

import { colour, token } from "./colours.js";
import { $, el, table } from "./dom.js";
import { clock, decimal } from "./format.js";

const TIMES_IN_TABLES = 8;
// Least distance of round marks in pixels; closer ones are not drawn.
const LEAST_GAP = 12;

export class Charts {
  constructor() {
    this.metric = "loss";
    this.range = 0;
    this.hidden = new Set();
    this.curves = null;
    this.rounds = [];
    this.onRange = () => {};
    this.buttons = new Map();
    this.loss = new Chart($("loss-chart"), () => this.rounds, { label: "loss, nats", digits: 2 });
    this.correlation = new Chart($("correlation-chart"), () => this.rounds, { label: "correlation", digits: 4 });
    for (const button of document.querySelectorAll("[data-metric]")) {
      button.addEventListener("click", () => { this.metric = button.dataset.metric; this.press("metric", button); this.draw(); });
    }
    for (const button of document.querySelectorAll("[data-range]")) {
      button.addEventListener("click", () => { this.range = Number(button.dataset.range); this.press("range", button); this.onRange(); });
    }
    for (const details of document.querySelectorAll("details")) details.addEventListener("toggle", () => this.tables());
  }

  press(group, chosen) {
    for (const button of document.querySelectorAll(`[data-${group}]`)) button.setAttribute("aria-pressed", String(button === chosen));
  }

  show(curves) {
    if (curves.range !== this.range) return;
    this.curves = curves;
    this.draw();
  }

  mark(rounds) {
    this.rounds = rounds.filter((round) => round.status === "committed").map((round) => round.t);
  }

  restyle() {
    this.loss.forget();
    this.correlation.forget();
    for (const [n, button] of this.buttons) button.firstChild.style.background = colour(n);
    this.draw();
  }

  draw() {
    if (!this.curves) return;
    const values = this.curves[this.metric];
    const peers = Object.keys(values).map(Number).filter((n) => values[n].some((value) => value != null));
    $("loss-empty").hidden = peers.length > 0;
    $("loss-chart").hidden = $("legend").hidden = peers.length === 0;
    if (peers.length) {
      this.loss.draw(this.curves.t, peers.map((n) => ({ name: `peer ${n}`, colour: colour(n), values: values[n], show: !this.hidden.has(n) })));
    }
    const known = this.curves.correlation.some((value) => value != null);
    $("correlation-empty").hidden = known;
    $("correlation-chart").hidden = !known;
    if (known) this.correlation.draw(this.curves.t, [{ name: "correlation", colour: token("--accent"), values: this.curves.correlation, show: true }]);
    this.tables();
  }

  // One button per peer, which hides or shows its curve.
  legend(peers) {
    const box = $("legend");
    for (const peer of peers) {
      if (this.buttons.has(peer.n)) continue;
      const button = el("button", { type: "button", "aria-pressed": "true", "data-n": peer.n }, el("span", { class: "swatch", "aria-hidden": "true" }), `peer ${peer.n}`);
      button.firstChild.style.background = colour(peer.n);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(peer.n)) this.hidden.add(peer.n);
        button.setAttribute("aria-pressed", String(!this.hidden.has(peer.n)));
        this.draw();
      });
      this.buttons.set(peer.n, button);
      box.insertBefore(button, [...box.children].find((other) => Number(other.dataset.n) > peer.n) ?? null);
    }
    for (const [n, button] of this.buttons) {
      if (!peers.some((peer) => peer.n === n)) { button.remove(); this.buttons.delete(n); }
    }
  }

  tables() {
    if (!this.curves) return;
    const { t, correlation } = this.curves;
    const places = Array.from({ length: Math.min(TIMES_IN_TABLES, t.length) }, (_, i, all) => Math.round(((i + 1) * t.length) / TIMES_IN_TABLES) - 1).filter((i) => i >= 0);
    const times = places.map((i) => clock(t[i]));
    const pick = (values, digits) => places.map((i) => decimal(values[i], digits));
    if ($("loss-table").parentElement.open) {
      const rows = Object.entries(this.curves[this.metric]).map(([n, values]) => [`peer ${n}`, ...pick(values, 3)]);
      $("loss-table").replaceChildren(table("Loss in nats", ["peer", ...times], rows));
    }
    if ($("correlation-table").parentElement.open) {
      $("correlation-table").replaceChildren(table("Correlation of the weights", ["", ...times], [["correlation", ...pick(correlation, 4)]]));
    }
  }
}

class Chart {
  constructor(box, rounds, { label, digits }) {
    this.box = box;
    this.rounds = rounds;
    this.label = label;
    this.digits = digits;
    this.plot = null;
    this.names = "";
    new ResizeObserver(() => this.plot?.setSize(this.size)).observe(box);
  }

  get size() {
    return { width: Math.max(200, this.box.clientWidth), height: this.box.clientHeight };
  }

  forget() {
    this.plot?.destroy();
    this.plot = null;
  }

  draw(t, series) {
    const names = JSON.stringify(series.map(({ name, show }) => [name, show]));
    const data = [t, ...series.map(({ values }) => values)];
    if (this.plot && names === this.names) {
      this.plot.setData(data);
      return;
    }
    this.forget();
    this.names = names;
    this.plot = new uPlot(this.options(series), data, this.box);
  }

  options(series) {
    const ink = token("--muted"), grid = { stroke: token("--line"), width: 1 };
    const font = "11px system-ui, sans-serif";
    const width = series.length > 12 ? 1 : 1.6;
    return {
      ...this.size,
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false, y: false } },
      padding: [8, 26, 0, 0],
      scales: { y: { range: (_, low, high) => this.span(low, high) } },
      axes: [
        { stroke: ink, font, grid, ticks: grid, space: 70, size: 30, values: (_, ticks) => ticks.map(clock) },
        { stroke: ink, font, grid, ticks: grid, label: this.label, labelFont: font, labelSize: 18, size: 58,
          values: (_, ticks) => ticks.map((value) => value.toFixed(this.digits)) },
      ],
      series: [{}, ...series.map(({ name, colour: stroke, show }) => ({ label: name, stroke, width, show, points: { show: false } }))],
      hooks: { drawAxes: [(plot) => this.drawRounds(plot)], setCursor: [(plot) => this.tip(plot, series)] },
    };
  }

  // Limit the axis, so that one diverged curve does not flatten the other curves.
  span(low, high) {
    if (low == null) return [0, 1];
    const values = this.plot ? this.plot.data.slice(1).flat().filter((value) => value != null).sort((a, b) => a - b) : [];
    const usual = values.length ? values[Math.floor(0.95 * (values.length - 1))] : high;
    const top = usual > 0 && high > 4 * usual ? 1.5 * usual : high;
    const room = Math.max((top - low) * 0.06, Math.abs(top) * 1e-4, 1e-6);
    return [low - room, top + room];
  }

  drawRounds(plot) {
    const { ctx, bbox } = plot;
    const places = this.rounds().map((t) => Math.round(plot.valToPos(t, "x", true)) + 0.5).filter((x) => x >= bbox.left && x <= bbox.left + bbox.width);
    if (places.length > bbox.width / (LEAST_GAP * devicePixelRatio)) return;
    ctx.save();
    ctx.strokeStyle = token("--round-mark");
    ctx.lineWidth = devicePixelRatio;
    for (const x of places) {
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  tip(plot, series) {
    let tip = this.box.querySelector(".tip");
    if (!tip) { tip = el("div", { class: "tip", "aria-hidden": "true" }); this.box.append(tip); }
    const { idx, left } = plot.cursor;
    tip.hidden = idx == null || left < 0;
    if (tip.hidden) return;
    const lines = series.map(({ name, colour: ink, show }, i) => ({ name, ink, show, value: plot.data[i + 1][idx] }))
      .filter(({ show, value }) => show && value != null).sort((a, b) => b.value - a.value);
    tip.hidden = lines.length === 0;
    const shown = lines.length > 8 ? [...lines.slice(0, 4), ...lines.slice(-4)] : lines;
    tip.replaceChildren(el("b", {}, clock(plot.data[0][idx])), ...shown.map(({ name, ink, value }) => {
      const line = el("span", {}, el("i"), `${name} ${value.toFixed(Math.max(3, this.digits))}`);
      line.firstChild.style.background = ink;
      return line;
    }));
    tip.classList.toggle("flip", left > plot.over.clientWidth / 2);
    tip.style.left = `${plot.over.offsetLeft + left}px`;
  }
}

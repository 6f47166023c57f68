// Entry point of the page: receives the state from the server and updates the panels.

import { Charts } from "./charts.js";
import { onThemeChange } from "./colours.js";
import { $, setText } from "./dom.js";
import { showNotices } from "./events.js";
import { Graph } from "./graph.js";
import { showBytes, showPeers, showTiles } from "./peers.js";
import { showRounds } from "./rounds.js";

const CURVES_EVERY_MS = 5000;
const THEMES = ["auto", "light", "dark"];

const state = { overview: null, rounds: [], notices: [], run: { run_id: "", trouble: "" } };
const charts = new Charts();
const graph = new Graph($("graph"));

function showRun() {
  const { run_id, trouble } = state.run;
  setText($("run-id"), run_id);
  document.title = state.overview ? `${state.overview.up} peers · ${run_id} · p2ptrain` : `${run_id} · p2ptrain`;
  $("trouble").hidden = !trouble;
  setText($("trouble"), trouble);
}

function showOverview() {
  const overview = state.overview;
  showTiles(overview);
  showPeers(overview, charts);
  showBytes(overview);
  graph.update(overview);
  showRounds(state.rounds, overview);
  showRun();
}

const draw = {
  run: showRun,
  overview: showOverview,
  rounds: () => { showRounds(state.rounds, state.overview); charts.mark(state.rounds); },
  notices: () => showNotices(state.notices),
};

function connect() {
  const source = new EventSource("/api/state");
  source.onopen = () => connection("live", "live");
  source.onerror = () => {
    connection("lost", "connection lost, trying again");
    // Browsers reconnect automatically, unless the server refused.
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  };
  for (const name of Object.keys(draw)) {
    source.addEventListener(name, (event) => {
      state[name] = JSON.parse(event.data);
      draw[name]();
    });
  }
}

function connection(mode, text) {
  $("connection").dataset.state = mode;
  setText($("connection-text"), text);
}

async function fetchCurves() {
  if (document.hidden) return;
  try {
    const answer = await fetch(`/api/curves?range=${charts.range}`);
    if (answer.ok) charts.show(await answer.json());
  } catch {
    // The event stream reports the lost connection.
  }
}

function chooseTheme() {
  const button = $("theme");
  const show = () => {
    const chosen = document.documentElement.dataset.theme ?? "auto";
    setText(button, { auto: "◐", light: "☀", dark: "☾" }[chosen]);
    button.setAttribute("aria-label", `Colour theme: ${chosen}`);
    button.title = `Colour theme: ${chosen}`;
  };
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % THEMES.length];
    if (next === "auto") {
      delete document.documentElement.dataset.theme;
      localStorage.removeItem("theme");
    } else {
      document.documentElement.dataset.theme = next;
      localStorage.setItem("theme", next);
    }
    show();
    document.dispatchEvent(new Event("themechange"));
  });
  show();
}

chooseTheme();
onThemeChange(() => { if (state.overview) { showOverview(); charts.restyle(); draw.rounds(); } });
charts.onRange = fetchCurves;
connect();
fetchCurves();
setInterval(fetchCurves, CURVES_EVERY_MS);
document.addEventListener("visibilitychange", fetchCurves);

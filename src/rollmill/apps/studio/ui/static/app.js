// The frame of all pages: header, addresses, keys, and the list of runs that is asked for again and again.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ask, go, html, keep, kept, link, Problem, useAddress, usePoll } from "./lib.js";
import { ComparePage } from "./compare.js";
import { CurvesPage } from "./curves.js";
import { RolloutPage } from "./rollout.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";

const KEYS = [
  ["/", "search"], ["j, k", "next, previous row or completion"], ["Enter", "open the row"],
  ["1 to 7", "tabs of a run"], ["← →", "token by token, in a completion"], ["u", "up: completion, run, runs"],
  ["t", "light, dark, or as the system"], ["?", "this help"],
];
const THEMES = ["", "light", "dark"];

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  keep("theme", theme);
  dispatchEvent(new Event("themechange"));
}

function up({ path, params }) {
  const run = params.get("run");
  if (path === "rollout") go("run", { run, tab: "rollouts" });
  else if (path !== "runs") go("runs");
}

function Help({ close }) {
  const button = useRef();
  useEffect(() => button.current.focus(), []);
  return html`<div class="veil" onClick=${close}>
    <div class="dialog" role="dialog" aria-modal="true" aria-label="Keys" onClick=${(event) => event.stopPropagation()}>
      <h2>Keys</h2>
      <dl class="keys">${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl>
      <button ref=${button} onClick=${close}>Close</button>
    </div>
  </div>`;
}

// Pages mark what keys act on: [data-row] can be moved through and opened, [data-search] gets the focus.
function onKey(event, here, toggleHelp) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.closest("input, textarea, select");
  if (event.key === "Escape") {
    toggleHelp(false);
    if (typing) typing.blur();
    return;
  }
  if (typing) return;
  const rows = [...document.querySelectorAll("[data-row]")];
  const at = rows.findIndex((row) => row.contains(document.activeElement));
  if (event.key === "/") document.querySelector("[data-search]")?.focus();
  else if (event.key === "?") toggleHelp(true);
  else if (event.key === "t") setTheme(THEMES[(THEMES.indexOf(kept("theme", "")) + 1) % THEMES.length]);
  else if (event.key === "u") up(here);
  else if (/^[1-9]$/.test(event.key)) document.querySelectorAll("[role=tab]")[event.key - 1]?.click();
  else if (event.key === "j" || event.key === "k") {
    const step = event.key === "j" ? 1 : -1;
    const turn = document.querySelector(`[data-${event.key === "j" ? "next" : "previous"}]`);
    if (turn) turn.click();
    else if (rows.length) {
      const row = rows[at < 0 ? 0 : Math.min(Math.max(at + step, 0), rows.length - 1)];
      (row.querySelector("[data-open]") ?? row.querySelector("a, button"))?.focus();
      row.scrollIntoView({ block: "nearest" });
    }
  } else return;
  event.preventDefault();
}

function App() {
  const here = useAddress();
  const [runs, setRuns] = useState({ runs: null, root: "", error: null });
  const [helps, setHelps] = useState(false);
  const [, setTurn] = useState(0);
  usePoll(async () => {
    try {
      const found = await ask("runs");
      setRuns((old) => (JSON.stringify(old.runs) === JSON.stringify(found.runs) && !old.error ? old : { ...found, error: null }));
    } catch (error) {
      setRuns((old) => ({ ...old, error: error.message }));
    }
  }, 2, []);
  useEffect(() => {
    const pressed = (event) => onKey(event, address, setHelps);
    const address = here;
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [here]);
  useEffect(() => {
    const turned = () => setTurn((turn) => turn + 1);
    addEventListener("themechange", turned);
    return () => removeEventListener("themechange", turned);
  }, []);
  const one = runs.runs?.find((card) => card.id === here.params.get("run"));
  useEffect(() => { document.title = one && here.path !== "runs" ? `${one.name} · rollmill` : "rollmill"; }, [one?.name, here.path]);
  const pages = { runs: RunsPage, run: RunPage, curves: CurvesPage, rollout: RolloutPage, compare: ComparePage };
  const Page = pages[here.path];
  return html`
    <header class="top">
      <a class="home" href=${link("runs")}><img src="/static/icon.svg" alt="" width="22" height="22" /> rollmill</a>
      <nav aria-label="Place">
        <a href=${link("runs")} aria-current=${here.path === "runs" ? "page" : null}>Runs</a>
        ${one && ["run", "rollout"].includes(here.path) && html`<span class="slash">/</span>
          <a href=${link("run", { run: one.id })} aria-current=${here.path === "run" ? "page" : null}>${one.id === "." ? one.name : one.id}</a>`}
      </nav>
      <span class="space"></span>
      <button class="quiet" title="Light or dark (t)" aria-label="Light or dark" onClick=${() =>
        setTheme(THEMES[(THEMES.indexOf(kept("theme", "")) + 1) % THEMES.length])}>${{ light: "☀", dark: "☾" }[kept("theme", "")] ?? "◐"}</button>
      <button class="quiet" title="Keys (?)" aria-label="Keys" onClick=${() => setHelps(true)}>?</button>
    </header>
    <main>
      <${Problem} text=${runs.error} />
      ${Page ? html`<${Page} key=${here.path + (here.params.get("run") ?? "")} ...${runs} params=${here.params} />` : html`<p class="empty">There is no such page.</p>`}
    </main>
    ${helps && html`<${Help} close=${() => setHelps(false)} />`}`;
}

setTheme(kept("theme", ""));
const place = document.getElementById("app");
place.replaceChildren();
render(html`<${App} />`, place);

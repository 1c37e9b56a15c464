// The table of runs: filters, order, and the choice of runs to overlay or compare.
import { useState } from "preact/hooks";
import { ago, Badge, duration, Empty, go, html, link, number, useKept } from "./lib.js";

const ACTIVE = ["running", "late", "stopped", "restarting"];
const GROUPS = { all: () => true, active: (run) => ACTIVE.includes(run.state), done: (run) => run.state === "done",
  ended: (run) => ["killed", "failed", "interrupted"].includes(run.state) };
const NAMES = { all: "All", active: "Running", done: "Done", ended: "Killed or failed" };
const COLUMNS = [
  ["name", "Run", (run) => run.id], ["state", "State", (run) => run.state],
  ["algorithm", "Algorithm", (run) => run.algorithms.join(" ")], ["model", "Model", (run) => run.model],
  ["step", "Step", (run) => run.step], ["reward", "Reward", (run) => run.reward],
  ["accuracy", "Accuracy", (run) => run.accuracy], ["speed", "Per step", (run) => run.seconds_per_step],
  ["updated", "Updated", (run) => run.updated],
];

function inOrder(runs, by, falling) {
  const value = COLUMNS.find(([name]) => name === by)[2];
  return [...runs].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === other) return 0;
    if (one === null || one === undefined) return 1;
    if (other === null || other === undefined) return -1;
    return (one < other ? -1 : 1) * (falling ? -1 : 1);
  });
}

function Progress({ run }) {
  const share = run.steps ? Math.min(1, run.step / run.steps) : 0;
  return html`<span class="progress"><span class="number">${run.step}${run.steps ? ` / ${run.steps}` : ""}</span>
    ${run.steps ? html`<span class="bar" aria-hidden="true"><span style=${{ width: `${100 * share}%` }}></span></span>` : null}</span>`;
}

export function RunsPage({ runs, root }) {
  const [text, setText] = useState("");
  const [group, setGroup] = useKept("group", "all");
  const [[by, falling], setOrder] = useKept("order", ["updated", true]);
  const [chosen, setChosen] = useState([]);
  if (runs === null) return html`<p class="loading">Reading the runs</p>`;
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const about = (run) => [run.id, run.name, run.state, run.model, run.stage, ...run.algorithms].join(" ").toLowerCase();
  const named = runs.filter((run) => words.every((word) => about(run).includes(word)));
  const visible = inOrder(named.filter(GROUPS[group] ?? GROUPS.all), by, falling);
  const there = chosen.filter((id) => runs.some((run) => run.id === id));
  const now = Date.now() / 1000;
  const choose = (id, on) => setChosen(on ? [...there, id] : there.filter((each) => each !== id));
  return html`
    <h1>Runs <small title="The folder">${root}</small></h1>
    <div class="bar-of-controls">
      <input type="search" data-search placeholder="Filter: name, algorithm, model ..." aria-label="Filter runs" value=${text}
        onInput=${(event) => setText(event.target.value)} />
      <div class="chips" role="group" aria-label="State">${Object.entries(NAMES).map(([name, title]) => html`
        <button class="chip" aria-pressed=${group === name} onClick=${() => setGroup(name)}>${title} ${named.filter(GROUPS[name]).length}</button>`)}</div>
      <span class="space"></span>
      <button disabled=${!there.length} onClick=${() => go("curves", { run: there })}>Overlay curves${there.length ? ` (${there.length})` : ""}</button>
      <button disabled=${there.length !== 2} title="Choose two runs" onClick=${() => go("compare", { a: there[0], b: there[1] })}>Compare two</button>
    </div>
    ${visible.length ? html`<div class="scroll"><table class="runs">
      <thead><tr><th class="check"><span class="unseen">Choose</span></th>${COLUMNS.map(([name, title]) => html`
        <th aria-sort=${by === name ? (falling ? "descending" : "ascending") : null} class=${`c-${name}`}>
          <button class="head" onClick=${() => setOrder(by === name ? [name, !falling] : [name, name !== "name"])}>${title}${by === name ? (falling ? " ↓" : " ↑") : ""}</button></th>`)}</tr></thead>
      <tbody>${visible.map((run) => html`<tr key=${run.id} data-row class=${there.includes(run.id) ? "chosen" : ""}>
        <td class="check"><label class="hit"><input type="checkbox" aria-label=${`Choose ${run.id}`} checked=${there.includes(run.id)}
          onChange=${(event) => choose(run.id, event.target.checked)} /></label></td>
        <td class="c-name"><a data-open href=${link("run", { run: run.id })}>${run.id === "." ? run.name : run.id}</a>${run.name !== run.id && run.id !== "." && html`<small>${run.name}</small>`}</td>
        <td class="c-state"><${Badge} state=${run.state} />${run.restarts ? html` <small title="Restarts of the process that trains">↻${run.restarts}</small>` : null}</td>
        <td class="c-algorithm">${run.algorithms.join(" → ") || "–"}</td>
        <td class="c-model"><span title=${run.model}>${run.model.split("/").filter(Boolean).pop() || "–"}</span></td>
        <td class="c-step"><${Progress} run=${run} /></td>
        <td class="c-reward number">${number(run.reward, 3)}</td>
        <td class="c-accuracy number">${number(run.accuracy, 3)}</td>
        <td class="c-speed number">${duration(run.seconds_per_step)}</td>
        <td class="c-updated number">${ago(run.updated, now)}</td>
      </tr>`)}</tbody></table></div>`
      : html`<${Empty}>${runs.length ? "No run matches the filters." : `There are no runs in ${root} yet. They appear here as soon as one starts.`}</${Empty}>`}`;
}

// Two runs side by side: evaluations task by task, metrics over common steps, and what differs in the run files.
import { useMemo, useState } from "preact/hooks";
import { Badge, Empty, go, html, link, number, Problem, shown, useAsk } from "./lib.js";
import { Curves, MAIN } from "./curves.js";

// An interval of a difference as a bar around zero.
function Interval({ low, high, value, most }) {
  if (low === null || !most) return null;
  const place = (each) => `${50 + 48 * Math.max(-1, Math.min(1, each / most))}%`;
  const [from, to] = [low, high].map((each) => Math.max(-1, Math.min(1, each / most)));
  return html`<span class="interval" aria-hidden="true"><i class="zero"></i><i class="span" style=${{ left: place(low), width: `${48 * (to - from)}%` }}></i><i class="mean" style=${{ left: place(value) }}></i></span>`;
}

function Difference({ row }) {
  const sure = row.low !== null && (row.low > 0 || row.high < 0);
  return html`<td class=${`number ${sure ? "sure" : ""}`}>${row.difference > 0 ? "+" : ""}${number(row.difference, 3)}</td>
    <td class="number">${row.low === null ? "–" : `${number(row.low, 3)} to ${number(row.high, 3)}`}</td>`;
}

function Evaluations({ found, names }) {
  if (found.step === null) return html`<section><h2>Evaluations</h2><${Empty}>There is no evaluation that both made after the same step.</${Empty}></section>`;
  const most = Math.max(...found.sets.flatMap((each) => [Math.abs(each.low ?? 0), Math.abs(each.high ?? 0), Math.abs(each.difference)]));
  return html`<section><h2>Evaluations after step ${found.step} <small>task by task, with the paired 95 % interval</small></h2>
    <div class="scroll"><table><thead><tr><th>Set</th><th class="number">Tasks</th><th class="number">${names[0]}</th><th class="number">${names[1]}</th><th class="number">Difference</th><th class="number">95 % interval</th><th></th><th class="number">Better</th><th class="number">Worse</th><th class="number">Equal</th></tr></thead>
    <tbody>${found.sets.map((each) => html`<tr><td>${shown(each.name || "held-out tasks")}</td><td class="number">${each.tasks}</td><td class="number">${number(each.a, 3)}</td><td class="number">${number(each.b, 3)}</td>
      <${Difference} row=${each} /><td><${Interval} ...${each} value=${each.difference} most=${most} /></td><td class="number">${each.better}</td><td class="number">${each.worse}</td><td class="number">${each.equal}</td></tr>`)}</tbody></table></div></section>`;
}

// The two settings over all seeds that the folder has of them: a run is one sample.
function Seeds({ a, b, revision, names }) {
  const [whole, setWhole] = useState(false);
  const { data, error } = useAsk("seeds", { a, b }, revision);
  if (error) return html`<${Problem} text=${error} />`;
  if (!data) return null;
  const place = ({ key }) => (MAIN.includes(key) ? MAIN.indexOf(key) : MAIN.length + 1);
  const main = data.metrics.filter((row) => whole || MAIN.includes(row.key)).sort((one, other) => place(one) - place(other));
  const rows = [...data.evaluations.map((row) => ({ ...row, title: `${row.key || "held-out tasks"}, step ${data.evaluated}` })), ...main];
  const paired = data.paired.length > 1;
  const of = (side) => html`<span class="seeds">${Object.entries(data[side]).map(([seed, run]) => html`<a href=${link("run", { run })} title=${run}>${seed}</a> `)}</span>`;
  return html`<section class="over-seeds"><h2>Over seeds <small>${paired ? "in pairs of equal seeds" : "without common seeds (Welch’s interval)"}; a run is one sample</small></h2>
    <p class="hint">${names[0]}: seeds ${of("a")} ${names[1]}: seeds ${of("b")} ${paired ? `Compared: ${data.paired.join(", ")}.` : ""} Means up to step ${data.until}.</p>
    <div class="scroll"><table><thead><tr><th>What</th><th class="number">Runs</th><th class="number">${names[0]}</th><th class="number">${names[1]}</th><th class="number">Difference</th><th class="number">95 % interval</th><th></th><th>Runs one by one</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr><td>${shown(row.title ?? row.key)}</td><td class="number">${row.seeds_a === row.seeds_b ? row.seeds_a : `${row.seeds_a}, ${row.seeds_b}`}</td><td class="number">${number(row.a)}</td><td class="number">${number(row.b)}</td><${Difference} row=${row} />
        <td><${Interval} ...${row} value=${row.difference} most=${row.low === null ? 0 : Math.max(Math.abs(row.low), Math.abs(row.high))} /></td><td><${Points} each=${row.each} paired=${row.paired} /></td></tr>`)}</tbody></table></div>
    ${data.metrics.length > main.length || whole ? html`<button class="quiet" onClick=${() => setWhole(!whole)}>${whole ? "Main metrics only" : `All ${data.metrics.length} metrics`}</button>` : null}</section>`;
}

// The runs of both sides as points, the upper row the first side; lines join pairs.
function Points({ each, paired }) {
  const all = each.flat(), low = Math.min(...all), high = Math.max(...all);
  const x = (value) => (high > low ? 5 + 110 * (value - low) / (high - low) : 60);
  return html`<svg class="points" width="120" height="26" role="img" aria-label=${`from ${number(low)} to ${number(high)}`}>
    ${paired && each[0].map((value, at) => html`<line x1=${x(value)} y1="6" x2=${x(each[1][at])} y2="20" />`)}
    ${each.map((side, row) => side.map((value) => html`<circle class=${row ? "second" : "first"} cx=${x(value)} cy=${row ? 20 : 6} r="3.5"><title>${number(value)}</title></circle>`))}</svg>`;
}

function Metrics({ rows, names }) {
  const [text, setText] = useState("");
  const [sure, setSure] = useState(false);
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const place = ({ key }) => (MAIN.includes(key) ? MAIN.indexOf(key) : key.startsWith("eval/") ? MAIN.length : MAIN.length + 1);
  const visible = [...rows].sort((a, b) => place(a) - place(b)).filter((row) => words.every((word) => row.key.toLowerCase().includes(word)) && (!sure || (row.low !== null && (row.low > 0 || row.high < 0))));
  return html`<section><h2>Metrics <small>means over the steps that both have; the interval is of the difference, by batch means</small></h2>
    <div class="bar-of-controls"><input type="search" data-search placeholder="Filter metrics" aria-label="Filter metrics" value=${text} onInput=${(event) => setText(event.target.value)} />
      <label><input type="checkbox" checked=${sure} onChange=${(event) => setSure(event.target.checked)} /> only where the interval leaves out zero</label></div>
    ${visible.length ? html`<div class="scroll tall"><table><thead><tr><th>Metric</th><th class="number">Steps</th><th class="number">${names[0]}</th><th class="number">${names[1]}</th><th class="number">Difference</th><th class="number">95 % interval</th><th></th></tr></thead>
      <tbody>${visible.map((row) => html`<tr key=${row.key} data-row><td>${shown(row.key)}</td><td class="number">${row.steps}</td><td class="number">${number(row.a)}</td><td class="number">${number(row.b)}</td><${Difference} row=${row} />
        <td><${Interval} ...${row} value=${row.difference} most=${row.low === null ? 0 : Math.max(Math.abs(row.low), Math.abs(row.high))} /></td></tr>`)}</tbody></table></div>` : html`<${Empty}>No metric matches.</${Empty}>`}</section>`;
}

function Settings({ rows, names }) {
  return html`<section><h2>Run files <small>${rows.length} keys differ</small></h2>
    ${rows.length ? html`<div class="scroll"><table class="settings"><thead><tr><th>Key</th><th>${names[0]}</th><th>${names[1]}</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr><td>${shown(row.key)}</td>${[row.a, row.b].map((value) => html`<td>${value === null ? html`<i>not there</i>` : html`<code>${shown(value)}</code>`}</td>`)}</tr>`)}</tbody></table></div>` : html`<${Empty}>Both are the same.</${Empty}>`}</section>`;
}

export function ComparePage({ runs, params }) {
  const [a, b] = [params.get("a"), params.get("b")];
  const found = (runs ?? []).filter((run) => [a, b].includes(run.id)).sort((one) => (one.id === a ? -1 : 1));
  const revision = found.map((run) => run.revision).join(" ");
  const { data, error, stale } = useAsk("compare", a && b ? { a, b } : null, revision);
  const names = [data?.a, data?.b];  // of the answer, which may be of the runs before
  const choose = (name) => html`<select aria-label=${name === "a" ? "First run" : "Second run"} value=${params.get(name) ?? ""} onChange=${(event) => go("compare", { a, b, [name]: event.target.value })}>
    <option value="">choose a run</option>${(runs ?? []).map((run) => html`<option value=${run.id}>${run.id}</option>`)}</select>`;
  const keys = useMemo(() => (data ? data.metrics.map((row) => row.key) : []), [data]);
  return html`
    <h1>Compare</h1>
    <div class="bar-of-controls">${choose("a")} <button aria-label="Swap" title="Swap" onClick=${() => go("compare", { a: b, b: a })}>⇄</button> ${choose("b")}
      ${found.map((run) => html`<a href=${link("run", { run: run.id })}>${run.id}</a> <${Badge} state=${run.state} />`)}</div>
    <${Problem} text=${error} />
    ${!a || !b ? html`<${Empty}>Choose two runs.</${Empty}>` : !data ? !error && html`<p class="loading">Comparing</p>` : html`
      <div class=${stale ? "stale" : ""}><${Evaluations} found=${data.evaluations} names=${names} />
      <${Seeds} a=${data.a} b=${data.b} revision=${revision} names=${names} />
      <${Settings} rows=${data.config} names=${names} />
      <${Metrics} rows=${data.metrics} names=${names} /></div>
      ${found.length === 2 && html`<h2 class="above-curves">Curves</h2><${Curves} runs=${found} keys=${keys} stages=${[]} domains=${[]} revision=${revision} />`}`}`;
}

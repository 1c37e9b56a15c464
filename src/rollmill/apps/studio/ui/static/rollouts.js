// The browser of completions: search, filters, order, and one task over time.
import { useEffect, useMemo, useState } from "preact/hooks";
import { ask, count, Empty, go, html, link, number, Problem, shown } from "./lib.js";
import { Chart } from "./chart.js";

const SORTS = { newest: "newest first", oldest: "oldest first", reward: "reward", length: "length", staleness: "staleness", turns: "turns" };
const PAGE = 100;
const FILTERS = ["of", "text", "task", "step", "at_least", "at_most", "source", "stop", "sort", "rising"];

// What was listed last, so that the page of a completion can go to the next one.
export const listed = { run: null, of: null, rows: [] };

function query(params) {
  const given = Object.fromEntries(FILTERS.map((name) => [name, params.get(name) ?? ""]));
  return { ...given, rising: undefined, descending: !given.rising, sort: given.sort || "newest" };
}

export function rewardClass(reward) {
  if (reward === null || reward === undefined) return "none";
  return reward >= 0.999 ? "best" : reward >= 0.5 ? "good" : reward > 0 ? "fair" : "bad";
}

export function Reward({ value }) {
  return html`<span class=${`reward ${rewardClass(value)}`}>${number(value, 3)}</span>`;
}

function useRollouts(run, params, pages, revision) {
  const [state, setState] = useState({ data: null, error: null, kind: null });
  const kind = JSON.stringify([run, params.get("of")]); // rows of another kind are not shown until these are there
  const wanted = JSON.stringify([run, query(params), pages]);
  useEffect(() => {
    const control = new AbortController();
    let timer;
    const load = async () => {
      try {
        const data = await ask("rollouts", { run, ...query(params), limit: Math.min(1000, PAGE * pages) }, { signal: control.signal });
        setState({ data, error: null, kind });
        if (data.pending) timer = setTimeout(load, 150);
      } catch (error) {
        if (error.name !== "AbortError") setState((old) => ({ ...old, error: error.message }));
      }
    };
    timer = setTimeout(load, state.data ? 180 : 0);
    return () => { clearTimeout(timer); control.abort(); };
  }, [wanted, revision]);
  return { ...state, data: state.kind === kind ? state.data : null };
}

// Rewards and lengths of one task over the steps of the run.
function TaskOverTime({ rows }) {
  const lines = useMemo(() => {
    const sorted = [...rows].sort((a, b) => a.step - b.step);
    const mean = (name) => {
      const by = new Map();
      for (const row of sorted) if (row[name] !== null) by.set(row.step, [...(by.get(row.step) ?? []), row[name]]);
      const all = [...by.values()];
      return { x: [...by.keys()], y: all.map((some) => some.reduce((a, b) => a + b, 0) / some.length),
        low: all.map((some) => Math.min(...some)), high: all.map((some) => Math.max(...some)), dots: true };
    };
    return { reward: [{ label: "mean, lowest to highest", colour: 0, ...mean("reward") }].filter((line) => line.x.length),
      length: [{ label: "mean, shortest to longest", colour: 1, ...mean("length") }].filter((line) => line.x.length) };
  }, [rows]);
  return html`<div class="charts"><${Chart} title="Reward of this task" lines=${lines.reward} height=${140} />
    <${Chart} title="Tokens of this task" lines=${lines.length} height=${140} /></div>`;
}

export function RolloutBrowser({ run, params, revision }) {
  const [pages, setPages] = useState(1);
  const { data, error } = useRollouts(run, params, pages, revision);
  const set = (changes) => {
    setPages(1);
    const now = Object.fromEntries(FILTERS.map((name) => [name, params.get(name) ?? ""]));
    go("run", { run, tab: "rollouts", ...now, ...changes }, { replace: true });
  };
  const field = (name, title, type = "text", width = "") => html`<label class=${width}>${title} <input type=${type} step="any" value=${params.get(name) ?? ""}
    onInput=${(event) => set({ [name]: event.target.value })} /></label>`;
  const rows = data?.rows ?? [];
  listed.run = run;
  listed.of = params.get("of");
  listed.rows = rows;
  const sort = params.get("sort") || "newest";
  const filtered = FILTERS.some((name) => !["of", "sort", "rising"].includes(name) && params.get(name));
  return html`
    <div class="bar-of-controls">
      <input type="search" data-search placeholder="Search in prompts, responses, tasks" aria-label="Search" value=${params.get("text") ?? ""} onInput=${(event) => set({ text: event.target.value })} />
      <label>Of <select value=${params.get("of") ?? ""} onChange=${(event) => set({ of: event.target.value })}><option value="">training</option><option value="evaluations">evaluations</option></select></label>
      ${field("task", "Task")} ${field("step", "Step", "number", "short")} ${field("at_least", "Reward from", "number", "short")} ${field("at_most", "to", "number", "short")}
      <label>Kind <select value=${params.get("source") ?? ""} onChange=${(event) => set({ source: event.target.value })}><option value="">all</option><option value="usual">rollout</option><option value="expert">demonstration</option><option value="preference">preference</option></select></label>
      <label>Ended by <select value=${params.get("stop") ?? ""} onChange=${(event) => set({ stop: event.target.value })}><option value="">all</option>${["eos", "stop", "length", "repetition", "aborted"].map((name) => html`<option>${name}</option>`)}</select></label>
      <label>Sort <select value=${sort} onChange=${(event) => set({ sort: event.target.value })}>${Object.entries(SORTS).map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select></label>
      ${!["newest", "oldest"].includes(sort) && html`<button onClick=${() => set({ rising: params.get("rising") ? "" : "1" })}>${params.get("rising") ? "lowest first ↑" : "highest first ↓"}</button>`}
      ${filtered && html`<button onClick=${() => go("run", { run, tab: "rollouts", of: params.get("of"), sort })}>Clear</button>`}
    </div>
    <${Problem} text=${error} />
    ${data && html`<p class="hint" role="status">${data.total} completions${data.pending ? ` so far: ${data.pending} of ${data.pending + data.steps} steps are still being read` : ` in ${data.steps} steps`}</p>`}
    ${params.get("task") && rows.length > 0 && html`<${TaskOverTime} rows=${rows} />`}
    ${!data && !error && html`<p class="loading">Reading completions</p>`}
    ${data && !rows.length && !data.pending && html`<${Empty}>${data.steps ? "No completion matches." : "The run stores no completions yet."}</${Empty}>`}
    ${rows.length > 0 && html`<div class="scroll"><table class="rollouts">
      <thead><tr><th class="number">Step</th><th>Reward</th><th class="number">Tokens</th><th class="number">Stale</th><th class="number">Turns</th><th>End</th><th>Task and response</th></tr></thead>
      <tbody>${rows.map((row) => html`<tr key=${`${row.step} ${row.offset}`} data-row>
        <td class="number" data-title="step">${row.step}</td><td><${Reward} value=${row.reward} /></td><td class="number" data-title="tokens">${count(row.length)}</td>
        <td class="number" data-title="stale">${row.staleness ?? "–"}</td><td class="number" data-title="turns">${row.turns}</td><td>${row.stop}${row.source !== "usual" ? html` <small>${row.source}</small>` : null}</td>
        <td class="text"><button class="task" title="This task over time" onClick=${() => set({ task: row.task })}>${shown(row.task)}</button>
          <a data-open href=${link("rollout", { run, of: params.get("of"), step: row.step, offset: row.offset, id: row.id })}>${row.response ? shown(row.response) : html`<i>empty</i>`}</a></td></tr>`)}</tbody></table></div>
      ${rows.length < Math.min(data.total, 1000) && html`<p><button onClick=${() => setPages(pages + 1)}>Show more</button></p>`}`}`;
}

export function neighbours(run, of, step, offset) {
  if (listed.run !== run || listed.of !== of) return [null, null];
  const at = listed.rows.findIndex((row) => row.step === step && row.offset === offset);
  return at < 0 ? [null, null] : [listed.rows[at - 1] ?? null, listed.rows[at + 1] ?? null];
}


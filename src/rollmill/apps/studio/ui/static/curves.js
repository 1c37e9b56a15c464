// Curves of one run or several: which charts there are, their controls, and the requests for their points.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, Empty, go, html, link, Problem, useAsk, useKept } from "./lib.js";
import { Chart } from "./chart.js";

export const MAIN = ["reward/mean", "loss", "length/mean", "entropy", "kl", "grad_norm", "ratio/clip_fraction", "staleness/mean",
  "logprob_gap/mean", "tokens_per_second", "seconds/total", "value/loss", "pairs/accuracy"];
const DASHES = [undefined, [6, 4], [2, 3], [10, 4, 2, 4]];
const AXES = { step: "steps", tokens: "tokens trained on", seconds: "seconds" };

// Charts from the names of metrics: [{title, group, keys: [{key, label}]}]. Domains share a chart; so do mean and max.
export function plan(keys, domain = "") {
  const charts = new Map();
  const add = (title, group, key, label) => {
    if (!charts.has(title)) charts.set(title, { title, group, keys: [] });
    charts.get(title).keys.push({ key, label });
  };
  const there = new Set(keys);
  for (const key of keys) {
    if (/_(low|high)$/.test(key) && there.has(key.replace(/_(low|high)$/, ""))) continue;
    if (key === "version") continue;
    const parts = key.split("/");
    if (parts[0] === "domain" && parts.length > 2) {
      if (!domain || parts[1] === domain) add(`${parts.slice(2).join("/")} by domain`, "domains", key, parts[1]);
    } else if (domain && parts.length > 2 && parts[1] !== domain && there.has(`domain/${parts[1]}/groups`)) continue;
    else if (MAIN.includes(key) || (parts[0] === "eval" && /(greedy|sampled|reward)$/.test(key))) add(key, "main", key, "");
    else if (parts.at(-1) === "max" && there.has(`${parts.slice(0, -1).join("/")}/mean`)) add(`${parts.slice(0, -1).join("/")} max`, parts[0], key, "");
    else add(key, parts.length > 1 ? parts[0] : "other", key, "");
  }
  const place = (chart) => { const at = MAIN.indexOf(chart.title); return at < 0 ? (chart.title.startsWith("eval") ? 0.5 : 99) : at; };
  const groups = new Map([["main", []]]);
  for (const chart of charts.values()) groups.set(chart.group, [...(groups.get(chart.group) ?? []), chart]);
  groups.set("main", groups.get("main").sort((a, b) => place(a) - place(b)));
  return [...groups].filter(([, some]) => some.length);
}

function useVisible() {
  const place = useRef();
  const [visible, setVisible] = useState(false);
  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => setVisible(entry.isIntersecting), { rootMargin: "300px" });
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  return [place, visible];
}

function LiveChart({ chart, runs, revision, view, onZoom }) {
  const [place, visible] = useVisible();
  const keys = chart.keys.map(({ key }) => key);
  const bands = keys.flatMap((key) => (key.startsWith("eval/") ? [`${key}_low`, `${key}_high`] : []));
  const params = { run: runs.map((run) => run.id), key: [...keys, ...bands], x: view.x, points: 500, stage: view.stage,
    low: view.range?.[0], high: view.range?.[1] };
  const { data, error, stale } = useAsk("curves", visible ? params : null, revision);
  const names = useMemo(() => shortNames(runs), [runs.map((run) => run.id).join("\n")]);
  const lines = useMemo(() => {
    if (!data) return [];
    const of = (run, key) => data.curves.find((curve) => curve.run === run && curve.key === key);
    return runs.flatMap((run, r) => chart.keys.flatMap(({ key, label }, k) => {
      const curve = of(run.id, key);
      if (!curve) return [];
      const [low, high] = [of(run.id, `${key}_low`), of(run.id, `${key}_high`)];
      const whole = low && high && low.x.length === curve.x.length;
      const several = runs.length > 1;
      return [{ label: [several || !label ? names[r] : "", label].filter(Boolean).join(" "), colour: several ? r : k,
        dash: several ? DASHES[k % DASHES.length] : undefined, x: curve.x, y: curve.y, dots: key.startsWith("eval/"),
        low: whole ? low.y : curve.low, high: whole ? high.y : curve.high }];
    }));
  }, [data]);
  return html`<div class="slot" ref=${place}>
    ${error ? html`<${Problem} text=${error} />` : html`<${Chart} title=${chart.title} lines=${lines} x=${view.x} weight=${view.weight}
      log=${view.log} range=${view.range} onZoom=${onZoom} stale=${stale && visible} note=${visible && data && !lines.length ? "no points here" : ""} />`}
  </div>`;
}

function shortNames(runs) {
  if (runs.length === 1) return [runs[0].name];
  return runs.map((run) => (run.id === "." ? run.name : run.id));
}

export function Curves({ runs, keys, stages, domains, revision }) {
  const [weight, setWeight] = useKept("smoothing", 0);
  const [x, setX] = useKept("axis", "step");
  const [log, setLog] = useState(false);
  const [stage, setStage] = useState("");
  const [domain, setDomain] = useState("");
  const [text, setText] = useState("");
  const [range, setRange] = useState(null);
  const [open, setOpen] = useState({ main: true, domains: true });
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const groups = useMemo(() => plan(keys, domain), [keys.join("\n"), domain]);
  const view = { x, weight, log, stage: stage || undefined, range };
  const fits = (chart) => words.every((word) => [chart.title, ...chart.keys.map(({ key }) => key)].join(" ").toLowerCase().includes(word));
  if (!keys.length) return html`<${Empty}>No metrics yet. They appear here after the first step.</${Empty}>`;
  return html`
    <div class="bar-of-controls sticky">
      <input type="search" data-search placeholder="Filter metrics" aria-label="Filter metrics" value=${text} onInput=${(event) => setText(event.target.value)} />
      <label>Smooth <input type="range" min="0" max="0.99" step="0.01" value=${weight} onInput=${(event) => setWeight(Number(event.target.value))} /><output>${weight.toFixed(2)}</output></label>
      <label>Over <select value=${x} onChange=${(event) => { setX(event.target.value); setRange(null); }}>${Object.entries(AXES).map(([name, title]) => html`<option value=${name}>${title}</option>`)}</select></label>
      ${stages.length > 1 && html`<label>Stage <select value=${stage} onChange=${(event) => { setStage(event.target.value); setRange(null); }}><option value="">all</option>${stages.map((name) => html`<option>${name}</option>`)}</select></label>`}
      ${domains.length > 1 && html`<label>Domain <select value=${domain} onChange=${(event) => setDomain(event.target.value)}><option value="">all</option>${domains.map((name) => html`<option>${name}</option>`)}</select></label>`}
      <label><input type="checkbox" checked=${log} onChange=${(event) => setLog(event.target.checked)} /> log</label>
      ${range && html`<button onClick=${() => setRange(null)}>Whole range</button>`}
    </div>
    ${groups.map(([name, charts]) => {
      const fitting = charts.filter(fits);
      if (!fitting.length) return null;
      const isOpen = words.length > 0 || (open[name] ?? false);
      return html`<section class="group" key=${name}>
        <h2><button class="head" aria-expanded=${isOpen} onClick=${() => setOpen({ ...open, [name]: !isOpen })}>${isOpen ? "▾" : "▸"} ${name} <small>${fitting.length}</small></button></h2>
        ${isOpen && html`<div class="charts">${fitting.map((chart) => html`<${LiveChart} key=${chart.title} chart=${chart} runs=${runs} revision=${revision} view=${view} onZoom=${setRange} />`)}</div>`}
      </section>`;
    })}`;
}

export function CurvesPage({ runs, params }) {
  const ids = params.getAll("run");
  const found = (runs ?? []).filter((run) => ids.includes(run.id)).sort((a, b) => ids.indexOf(a.id) - ids.indexOf(b.id));
  const revision = found.map((run) => run.revision).join(" ");
  const [details, setDetails] = useState({});
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    let ended = false;
    Promise.all(found.map((run) => ask("run", { run: run.id }))).then(
      (all) => ended || setDetails(Object.fromEntries(all.map((each) => [each.card.id, each]))),
      (error) => ended || setProblem(error.message),
    );
    return () => { ended = true; };
  }, [revision]);
  if (runs === null) return html`<p class="loading">Reading the runs</p>`;
  const all = Object.values(details);
  const union = (name) => [...new Set(all.flatMap((each) => each[name]))];
  const lost = ids.filter((id) => !found.some((run) => run.id === id));
  return html`
    <h1>Curves <small>${found.length} runs</small></h1>
    <div class="chips">${found.map((run) => html`<span class="chip"><a href=${link("run", { run: run.id })}>${run.id}</a>
      <button class="quiet" aria-label=${`Remove ${run.id}`} onClick=${() => go("curves", { run: ids.filter((id) => id !== run.id) })}>×</button></span>`)}
      ${found.length === 2 && html`<a class="chip" href=${link("compare", { a: found[0].id, b: found[1].id })}>Compare the two</a>`}</div>
    <${Problem} text=${problem ?? (lost.length ? `not found: ${lost.join(", ")}` : null)} />
    ${found.length === 0 ? html`<${Empty}>Choose runs in the table of runs.</${Empty}>`
      : all.length ? html`<${Curves} runs=${found} keys=${union("keys")} stages=${union("stages")} domains=${union("domains")} revision=${revision} />` : html`<p class="loading">Reading metrics</p>`}`;
}

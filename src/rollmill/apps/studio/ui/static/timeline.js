// Where time goes: seconds by phase over the run, single steps span by span; and what the pipeline keeps.
import { useMemo, useState } from "preact/hooks";
import { bytes, clock, count, duration, Empty, html, lineColour, number, plain, Problem, shown, useAsk, useKept } from "./lib.js";
import { Chart } from "./chart.js";

const PHASES = ["rollout", "inference", "reward", "train", "move", "eval", "checkpoint"];
const PHASE_PLACES = Object.fromEntries(PHASES.map((name, at) => [name, at]));
const MOST_BARS = 300;

function phaseColour(name) {
  const at = PHASES.indexOf(name);
  return lineColour(at < 0 ? 7 : at);
}

// Seconds by phase, each added to those below, so that the space between two lines is a phase.
function Phases({ run, keys, revision }) {
  const names = useMemo(() => [...PHASES, ...keys.filter((key) => key.startsWith("seconds/")).map((key) => key.slice(8))]
    .filter((name, at, all) => name !== "total" && all.indexOf(name) === at && keys.includes(`seconds/${name}`)), [keys.join()]);
  const { data, error } = useAsk("curves", names.length ? { run, key: names.map((name) => `seconds/${name}`), points: 250 } : null, revision);
  const stacked = useMemo(() => {
    if (!data) return [];
    const table = window.uPlot.join(names.map((name) => { const curve = data.curves.find((each) => each.key === `seconds/${name}`); return [curve?.x ?? [], curve?.y ?? []]; }));
    const sums = table[0].map(() => 0);
    return names.map((name, at) => {
      const low = sums.slice();
      table[at + 1].forEach((value, i) => { sums[i] += value ?? 0; });
      return { label: name, colour: Math.max(0, PHASES.indexOf(name)), x: table[0], y: sums.slice(), low, high: sums.slice(), own: table[at + 1] };
    }).reverse();
  }, [data]);
  if (!names.length) return null;
  return html`<section><h2>Seconds by phase <small>one above the other; of a step</small></h2>${error ? html`<${Problem} text=${error} />`
    : html`<div class="charts wide"><${Chart} title="Phases, stacked" lines=${stacked} height=${220} unit=${(value) => duration(value)} /></div>`}</section>`;
}

function lanes(timeline) {
  const kinds = Object.entries(timeline.spans);
  const phases = kinds.filter(([kind]) => PHASES.includes(kind) && kind !== "reward" || kind === "reward");
  const found = [];
  const of = (kind, times) => times.map(([requested, started, ended]) => ({ kind, requested, started, ended }));
  if (phases.length) found.push({ name: "step", note: "phases", bars: phases.flatMap(([kind, times]) => of(kind, times)), flat: true });
  const devices = new Map();
  for (const [kind, times] of kinds) {
    if (!kind.startsWith("device/")) continue;
    const [, phase, ...rest] = kind.split("/");
    const name = rest.join("/");
    const lane = devices.get(name) ?? { name: name.replace(/_/g, " "), bars: [], flat: true, bytes: 0 };
    lane.bars.push(...of(phase, times));
    lane.bytes = Math.max(lane.bytes, timeline.bytes?.[kind] ?? 0);
    devices.set(name, lane);
  }
  for (const lane of devices.values()) found.push({ ...lane, note: `on the device, ${bytes(lane.bytes)}` });
  for (const [kind, times] of kinds) {
    if (kind.startsWith("device/") || PHASES.includes(kind)) continue;
    const sorted = of(kind, times).sort((a, b) => a.requested - b.requested);
    const every = Math.ceil(sorted.length / MOST_BARS);
    const mean = sorted.reduce((sum, bar) => sum + bar.ended - bar.started, 0) / sorted.length;
    found.push({ name: kind.replace(/^reward\//, ""), note: `${sorted.length}, mean ${duration(mean)}`, bars: sorted.filter((_, at) => at % every === 0) });
  }
  return found;
}

function Lane({ lane, begin, span }) {
  const place = (seconds) => `${(100 * (seconds - begin)) / span}%`;
  const height = lane.flat ? 16 : Math.max(1.5, Math.min(7, 110 / lane.bars.length));
  return html`<div class="lane"><div class="lane-name"><b>${shown(lane.name)}</b><small>${lane.note}</small></div>
    <div class="lane-bars" style=${{ height: `${lane.flat ? 16 : Math.max(14, height * lane.bars.length)}px` }}>${lane.bars.map((bar, at) => {
      const top = lane.flat ? 0 : at * height;
      const colour = lane.flat ? phaseColour(bar.kind) : lineColour(bar.kind.startsWith("reward/") ? 2 : 0);
      const title = `${bar.kind}: ${duration(bar.ended - bar.started)}, from ${duration(Math.max(0, bar.started))}${bar.started > bar.requested ? `, after ${duration(bar.started - bar.requested)} of waiting` : ""}`;
      return html`${bar.started > bar.requested && html`<i class="waiting" style=${{ left: place(bar.requested), width: place(bar.started - bar.requested + begin), top: `${top}px`, height: `${Math.max(1, height * 0.85)}px`, background: colour }}></i>`}
        <i title=${title} style=${{ left: place(bar.started), width: `max(1px, ${place(bar.ended - bar.started + begin)})`, top: `${top}px`, height: `${Math.max(1, height * 0.85)}px`, background: colour }}></i>`;
    })}</div></div>`;
}

function Step({ run, revision }) {
  const [step, setStep] = useState("");
  const { data, error } = useAsk("timeline", { run, step }, revision);
  if (error) return html`<${Problem} text=${error} />`;
  if (!data) return html`<p class="loading">Reading the timeline</p>`;
  if (!data.timeline) return html`<section><h2>One step</h2><${Empty}>No step's timeline is recorded yet: see monitor.timeline_every.</${Empty}></section>`;
  const all = lanes(data.timeline);
  const times = all.flatMap((lane) => lane.bars.flatMap((bar) => [bar.requested, bar.ended]));
  const begin = times.reduce((a, b) => Math.min(a, b), 0);
  const end = times.reduce((a, b) => Math.max(a, b), data.timeline.seconds ?? 0);
  const span = Math.max(end - begin, 1e-9);
  const used = [...new Set(all.filter((lane) => lane.flat).flatMap((lane) => lane.bars.map((bar) => bar.kind)))];
  return html`<section><h2>One step <select aria-label="Step" value=${data.timeline.step} onChange=${(event) => setStep(event.target.value)}>
      ${data.steps.map((each) => html`<option value=${each}>step ${each}</option>`)}</select> <small>${duration(data.timeline.seconds)}, ${shown(data.timeline.stage ?? "")}</small></h2>
    <div class="step-timeline">${all.map((lane) => html`<${Lane} lane=${lane} begin=${begin} span=${span} />`)}
      <div class="lane axis"><div class="lane-name"></div><div class="lane-bars">${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<span style=${{ left: `${100 * share}%` }}>${duration(begin + share * span)}</span>`)}</div></div></div>
    <ul class="legend">${used.map((kind) => html`<li><i style=${{ background: phaseColour(kind) }}></i><span>${kind}</span></li>`)}<li><i class="pale"></i><span>waiting: for a place in the engine's batch, or for a worker</span></li></ul></section>`;
}

const WINDOWS = { 60: "the last minute", 600: "the last 10 minutes", 3600: "the last hour", "": "all that is recorded" };
const ACTIVITIES = { "roll out": "rollout", evaluate: "eval", "write the checkpoint of step": "checkpoint" };

// The phase that an activity belongs to: its colour is that of the phase.
function phaseOf(activity) {
  const plain = activity.replace(/\s*\d+$/, "");
  const found = ACTIVITIES[plain] ?? (plain.startsWith("roll out") ? "rollout" : plain);
  return PHASES.includes(found) ? found : "other";
}

// What each process did, and what it waited for, over the last minutes.
function Processes({ run, revision }) {
  const [seconds, setSeconds] = useKept("window", "600");
  const { data, error } = useAsk("processes", { run, seconds }, revision);
  if (error) return html`<${Problem} text=${error} />`;
  if (!data || !data.processes.length) return null;
  const span = Math.max(data.end - data.begin, 1e-3);
  const place = (at) => `${(100 * at) / span}%`;
  const used = [...new Set(data.processes.flatMap((each) => each.spans.map(([, , kind]) => phaseOf(kind))))];
  const explorers = data.processes.some((each) => each.name.startsWith("explorer"));  // else this process generates itself
  const waiting = (kind, waits) => Boolean(waits) && (explorers || !["rollout", "eval"].includes(phaseOf(kind)));
  const inOrder = [...PHASES, "other"].filter((name) => used.includes(name));
  return html`<section><h2>Processes <select aria-label="Time" value=${seconds} onChange=${(event) => setSeconds(event.target.value)}>
      ${Object.entries(WINDOWS).map(([value, title]) => html`<option value=${value}>${title}</option>`)}</select> <small>until ${clock(data.end)}</small></h2>
    <div class="step-timeline processes">${data.processes.map((one) => {
      const busy = one.spans.reduce((sum, [from, to, kind, waits]) => sum + (waiting(kind, waits) ? 0 : to - from), 0);
      return html`<div class="lane"><div class="lane-name"><b>${shown(one.name)}</b><small>${one.spans.length ? `computes ${Math.round((100 * busy) / span)} %` : "nothing in this time"}</small></div>
        <div class="lane-bars" style=${{ height: "18px" }}>${one.spans.map(([from, to, kind, waits, version]) => html`<i class=${waiting(kind, waits) ? "waiting" : ""} style=${{ left: place(from), width: `max(1px, ${place(to - from)})`, height: "18px", background: phaseColour(phaseOf(kind)) }}
          title=${plain(`${kind}${waits ? `, waits for ${waits}` : ""}: ${duration(to - from)}${version < 0 ? "" : `, version ${version}`}, from ${duration(from)}`)}></i>`)}</div></div>`;
    })}
      <div class="lane axis"><div class="lane-name"></div><div class="lane-bars">${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<span style=${{ left: `${100 * share}%` }}>${duration(share * span)}</span>`)}</div></div></div>
    <ul class="legend">${inOrder.map((kind) => html`<li><i style=${{ background: phaseColour(kind) }}></i><span>${kind}</span></li>`)}<li><i class="pale"></i><span>waiting, for what the pointer says</span></li></ul></section>`;
}

// What each phase held in memory, and what was moved for it, over the run.
function Residents({ run, keys, revision }) {
  const memory = keys.filter((key) => key.startsWith("memory/")), moved = keys.filter((key) => /^residency\/.*\/gb$/.test(key));
  const wanted = [...memory, ...moved];
  const { data, error } = useAsk("curves", wanted.length ? { run, key: wanted, points: 250 } : null, revision);
  const lines = useMemo(() => (some, name) => some.flatMap((key, at) => {
    const curve = data?.curves.find((each) => each.key === key);
    return curve ? [{ label: name(key), colour: name(key) in PHASE_PLACES ? PHASE_PLACES[name(key)] : at, x: curve.x, y: curve.y, low: curve.low, high: curve.high }] : [];
  }), [data]);
  const peaks = useMemo(() => lines(memory, (key) => key.slice(7)), [lines]);
  const moves = useMemo(() => lines(moved, (key) => key.slice(10, -3)), [lines]);
  if (!wanted.length) return null;
  return html`<section><h2>On the device <small>with offloading, over the run</small></h2>${error ? html`<${Problem} text=${error} />`
    : html`<div class="charts">${peaks.length > 0 && html`<${Chart} title="Peak memory by phase, GB" lines=${peaks} />`}${moves.length > 0 && html`<${Chart} title="Moved or freed in a step, GB" lines=${moves} />`}</div>`}</section>`;
}

export function TimelineTab({ run, keys, revision }) {
  return html`<${Phases} run=${run} keys=${keys} revision=${revision} /><${Processes} run=${run} revision=${revision} />
    <${Residents} run=${run} keys=${keys} revision=${revision} /><${Step} run=${run} revision=${revision} />`;
}

// -- pipeline --------------------------------------------------------------------------------------------------

function FunnelRow({ name, value, most, note, kind = "" }) {
  return html`<div class=${`funnel-row ${kind}`}><span class="funnel-name">${shown(name)}</span>
    <span class="funnel-bar"><i style=${{ width: `${most ? Math.max(0.3, (100 * value) / most) : 0}%` }}></i></span>
    <span class="number">${count(value)}</span><span class="hint">${note}</span></div>`;
}

export function PipelineTab({ run, last, revision }) {
  const [recent, setRecent] = useState(0);
  const { data, error } = useAsk("funnel", { run, first: recent ? Math.max(0, last - recent + 1) : 0 }, revision);
  if (error) return html`<${Problem} text=${error} />`;
  if (!data) return html`<p class="loading">Reading metrics</p>`;
  const first = data.operators[0];
  const raw = first ? first.kept + first.changed + first.dropped : data.experiences;
  const most = Math.max(raw, data.experiences, ...data.operators.map((each) => each.kept + each.changed + each.added), 1);
  const reasons = (each) => Object.entries(each.reasons).filter(([, value]) => value).map(([name, value]) => `${name.replace(/_/g, " ")} ${count(value)}`).join(", ");
  return html`
    <div class="bar-of-controls"><label>Steps <select value=${recent} onChange=${(event) => setRecent(Number(event.target.value))}>
      <option value="0">all</option><option value="10">the last 10</option><option value="100">the last 100</option><option value="1000">the last 1000</option></select></label>
      <span class="hint">From what was rolled out to what was learned from, in experiences. ${data.groups ? `${count(data.groups)} groups were rolled out.` : ""}</span></div>
    <section class="funnel">
      <${FunnelRow} name="before the pipeline" value=${raw} most=${most} note="" />
      ${data.operators.map((each) => html`
        <${FunnelRow} name=${`after ${each.name}`} value=${each.kept + each.changed + each.added} most=${most}
          note=${[each.dropped ? `dropped ${count(each.dropped)}` : "", each.changed ? `changed ${count(each.changed)}` : "", each.added ? `added ${count(each.added)}` : "", reasons(each)].filter(Boolean).join("; ") || "kept all"} />`)}
      <${FunnelRow} name="learned from" value=${data.experiences} most=${most} kind="final" note=${`${count(data.completions)} new completions, ${count(data.judged)} with a reward; ${count(data.tokens)} tokens`} />
    </section>
    ${Object.entries(data.others).some(([, value]) => value) && html`<section><h2>Besides</h2><dl class="facts">${Object.entries(data.others).filter(([, value]) => value).map(([name, value]) => html`<div><dt>${shown(name)}</dt><dd>${number(value)}</dd></div>`)}</dl></section>`}
    ${!data.operators.length && html`<p class="hint">The run has no pipeline operators.</p>`}`;
}

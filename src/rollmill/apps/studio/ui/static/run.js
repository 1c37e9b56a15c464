// The page of a run: its state on top, and a tab for each kind of thing that it has recorded.
import { useEffect, useState } from "preact/hooks";
import { ago, ask, Badge, bytes, clock, count, duration, Empty, go, html, number, Problem, shown, useAsk } from "./lib.js";
import { Curves } from "./curves.js";
import { RolloutBrowser } from "./rollouts.js";
import { PipelineTab, TimelineTab } from "./timeline.js";

const TABS = { overview: "Overview", curves: "Curves", rollouts: "Rollouts", timeline: "Timeline", pipeline: "Pipeline",
  checkpoints: "Checkpoints", config: "Run file" };
const TOLD = ["time", "event", "step"];

function Facts({ card, details }) {
  const { summary } = details;
  const left = card.steps && card.seconds_per_step && card.state === "running" ? (card.steps - card.step) * card.seconds_per_step : null;
  const facts = [
    ["Step", `${card.step}${card.steps ? ` of ${card.steps}` : ""}`], ["Stage", card.stage], ["Reward", number(card.reward, 3)],
    ["Accuracy", number(card.accuracy, 3)], ["Per step", duration(card.seconds_per_step)], ["Left, about", left ? duration(left) : null],
    ["Took", summary.seconds ? duration(summary.seconds) : null],
    ["Generated", summary.generated_tokens ? `${count(summary.generated_tokens)} tokens` : null],
    ["Peak memory", summary.peak_rss_mb ? bytes(summary.peak_rss_mb * 2 ** 20) : null], ["Best step", summary.best_step],
  ];
  return html`<dl class="facts">${facts.filter(([, value]) => value !== null && value !== undefined && value !== "" && value !== "–").map(([name, value]) => html`<div><dt>${name}</dt><dd>${shown(value)}</dd></div>`)}</dl>`;
}

function Processes({ processes, now }) {
  if (!processes.length) return null;
  return html`<section><h2>Processes</h2><div class="scroll"><table>
    <thead><tr><th>Process</th><th>State</th><th>Does</th><th>Waits for</th><th>Since</th><th>Version</th><th>Heartbeat</th><th>Host, pid</th></tr></thead>
    <tbody>${processes.map((each) => html`<tr><td>${shown(each.name)}</td><td><${Badge} state=${each.state === "ended" ? "done" : each.state} />${each.ended && each.ended !== "done" ? html` <small>${shown(each.ended)}</small>` : null}</td>
      <td>${shown(each.doing)}</td><td>${shown(each.waits_for || "–")}</td><td>${ago(each.since, now)}</td><td>${each.version < 0 ? "–" : each.version}</td>
      <td>${ago(each.beat, now)}</td><td>${shown(each.host)}, ${each.pid}</td></tr>`)}</tbody></table></div></section>`;
}

function Events({ events }) {
  return html`<section><h2>Events <small>restarts, failures that the run got over, warnings</small></h2>
    ${events.length ? html`<ol class="events">${[...events].reverse().map((event) => html`<li class=${event.event}>
      <time>${clock(event.time)}</time> <b>${shown(event.event)}</b>${event.step !== undefined && html` <span class="step">step ${event.step}</span>`}
      <span class="text">${Object.entries(event).filter(([name]) => !TOLD.includes(name)).map(([name, value]) => html`<span>${["text", "reason"].includes(name) ? null : html`<small>${shown(name)}</small> `}${shown(typeof value === "string" ? value : JSON.stringify(value))}</span> `)}</span></li>`)}</ol>`
      : html`<${Empty}>Nothing out of the ordinary has happened.</${Empty}>`}</section>`;
}

function Checkpoints({ run }) {
  const { data, error } = useAsk("checkpoints", { run }, 0);
  const [verified, setVerified] = useState({});
  const verify = async (name) => {
    setVerified((old) => ({ ...old, [name]: { state: "reading" } }));
    try {
      const { checkpoints } = await ask("verify", { run, name }, { method: "POST" });
      setVerified((old) => ({ ...old, [name]: checkpoints[0] ?? { state: "gone" } }));
    } catch (problem) {
      setVerified((old) => ({ ...old, [name]: { state: "unreadable", damage: [problem.message] } }));
    }
  };
  if (error) return html`<${Problem} text=${error} />`;
  if (!data) return html`<p class="loading">Reading</p>`;
  if (!data.checkpoints.length) return html`<${Empty}>There is no checkpoint yet.</${Empty}>`;
  const rows = data.checkpoints.map((each) => ({ ...each, ...verified[each.name] }));
  return html`<p class="hint">“complete” means that no file is missing or has another size. Verify reads every byte, and compares it with the hashes.
      <button onClick=${async () => { for (const each of data.checkpoints) await verify(each.name); }}>Verify all</button></p>
    <div class="scroll"><table><thead><tr><th>Checkpoint</th><th>State</th><th></th><th>Size</th><th>Written</th><th>Format</th><th>rollmill</th></tr></thead>
    <tbody>${rows.map((each) => html`<tr key=${each.name} data-row><td>${each.name}</td><td><${Badge} state=${each.state} />${(each.damage ?? []).map((what) => html`<div class="damage">${shown(what)}</div>`)}</td>
      <td><button disabled=${each.state === "reading"} onClick=${() => verify(each.name)}>Verify</button></td>
      <td class="number">${bytes(each.bytes)}</td><td>${clock(each.written_at)}</td><td>${each.format ?? "–"}</td><td>${shown(each.rollmill || "–")}</td></tr>`)}</tbody></table></div>`;
}

function RunFile({ run, revision }) {
  const { data, error } = useAsk("config", { run }, revision);
  const [text, setText] = useState("");
  if (error) return html`<${Problem} text=${error} />`;
  if (!data) return html`<p class="loading">Reading</p>`;
  const lines = data.text.split("\n").filter((line) => line.toLowerCase().includes(text.toLowerCase()));
  return html`<div class="bar-of-controls"><input type="search" data-search placeholder="Filter lines" aria-label="Filter lines" value=${text} onInput=${(event) => setText(event.target.value)} />
    <span class="hint">The resolved run file, with every default.</span></div><pre class="file">${shown(lines.join("\n"))}</pre>`;
}

export function RunPage({ runs, params }) {
  const id = params.get("run");
  const tab = TABS[params.get("tab")] ? params.get("tab") : "overview";
  const card = runs?.find((run) => run.id === id);
  const beat = card ? `${card.revision} ${card.state} ${card.restarts} ${Math.round(card.updated ?? 0)}` : "";
  const { data: details, error } = useAsk("run", { run: id }, beat);
  useEffect(() => { document.querySelector(`[role=tab][aria-selected=true]`)?.scrollIntoView({ block: "nearest", inline: "nearest" }); }, [tab, !details]);
  if (error && !details) return html`<${Problem} text=${error} />`;
  if (!details) return html`<p class="loading">Reading the run</p>`;
  const now = card ?? details.card;
  const content = {
    overview: () => html`<${Facts} card=${now} details=${details} />
      <${Processes} processes=${details.processes} now=${details.now} /><${Events} events=${details.events} />`,
    curves: () => html`<${Curves} runs=${[now]} keys=${details.keys} stages=${details.stages} domains=${details.domains} revision=${now.revision} />`,
    rollouts: () => html`<${RolloutBrowser} run=${id} params=${params} revision=${now.revision} />`,
    timeline: () => html`<${TimelineTab} run=${id} keys=${details.keys} revision=${now.revision} last=${details.last_step} />`,
    pipeline: () => html`<${PipelineTab} run=${id} last=${details.last_step} revision=${now.revision} />`,
    checkpoints: () => html`<${Checkpoints} run=${id} />`,
    config: () => html`<${RunFile} run=${id} />`,
  }[tab];
  return html`
    <h1>${shown(now.name)} <${Badge} state=${now.state} /> <small>${now.algorithms.join(" → ")}${now.model ? ` · ${now.model}` : ""}</small></h1>
    ${details.problems.map((text) => html`<${Problem} text=${text} />`)}
    <div class="tabs" role="tablist">${Object.entries(TABS).map(([name, title]) => html`
      <button role="tab" aria-selected=${tab === name} onClick=${() => go("run", { run: id, tab: name })}>${title}</button>`)}</div>
    <div class="tab" role="tabpanel">${content()}</div>`;
}

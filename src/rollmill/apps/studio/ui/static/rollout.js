// A completion: its tokens with what engine and trainer know of each, and the tree of the turns of its rollout.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ask, clock, duration, go, html, isDark, link, number, plain, Problem, shown, useAsk, useKept } from "./lib.js";
import { neighbours, Reward } from "./rollouts.js";

// What tokens can be coloured by: the value of a token, and its place on the scale from 0 to 1 (or -1 to 1, `signed`).
const COLOURS = {
  logprob: { title: "log-prob", value: (t, i) => t.logprobs[i], place: (value) => Math.min(1, -value / 4), low: "sure", high: "surprising" },
  advantage: { title: "advantage", value: (t, i) => t.advantage?.[i] ?? null, signed: true, low: "worse", high: "better" },
  gap: { title: "engine/trainer gap", value: (t, i) => (t.trainer_logprobs ? t.trainer_logprobs[i] - t.logprobs[i] : null), signed: true, low: "engine likelier", high: "trainer likelier" },
  entropy: { title: "entropy", value: (t, i) => t.entropy?.[i] ?? null, low: "certain", high: "undecided" },
  version: { title: "version", value: (t, i) => (t.versions[i] < 0 ? null : t.versions[i]), low: "old", high: "new", spread: true },
  drafts: { title: "drafts", value: (t, i) => t.drafted?.[i] || null, kinds: true },
  mask: { title: "mask", value: (t, i) => t.mask[i], place: (value) => value * 0.6, low: "not learned", high: "learned" },
};

// Parts that draft tokens had in a token, by number: what it says of the token, and its colour.
const DRAFTED = [
  ["not drafted", null], ["an earlier completion's token, accepted", "var(--accent)"],
  ["guessed, and right", "var(--warm)"], ["sampled in place of a rejected draft", "var(--cold)"],
];

function scale(name, tokens) {
  const { value, signed, place, spread, kinds } = COLOURS[name];
  const values = tokens.ids.map((_, i) => (tokens.mask[i] || name === "mask" ? value(tokens, i) : null));
  const known = values.filter((each) => each !== null && Number.isFinite(each));
  const most = Math.max(signed ? 1e-9 : 1e-6, ...known.map(Math.abs)), least = Math.min(...known);
  const at = kinds ? (each) => each : place ?? (spread ? (each) => (most > least ? (each - least) / (most - least) : 0.5) : (each) => each / most);
  return { values, at: values.map((each) => (each === null || !Number.isFinite(each) ? null : at(each))), most, least, known: known.length > 0 };
}

function ground(at, { signed, kinds }, dark) {
  if (at === null) return undefined;
  const strength = Math.round(kinds ? 45 : Math.min(1, Math.abs(at)) * (dark ? 75 : 62));
  const hue = kinds ? DRAFTED[at][1] : signed ? (at < 0 ? "var(--cold)" : "var(--warm)") : "var(--heat)";
  return strength ? `color-mix(in srgb, ${hue} ${strength}%, transparent)` : undefined;
}

function tokenText(text) {
  const odd = plain(text);
  return odd.replace(/\n/g, "↵\n").replace(/\t/g, "⇥\t") || "∅";
}

function About({ tokens, at }) {
  if (at === null) return html`<div class="about empty">Point at a token, or walk with ← and →.</div>`;
  const i = at;
  const learned = tokens.mask[i] === 1;
  const rows = [
    ["index, id", `${tokens.start + i}, ${tokens.ids[i]}`],
    ["by", learned ? "the policy; counts in the loss" : "not the policy, or not learned from"],
    ...(learned ? [
      ["log-prob, engine", tokens.logprobs[i] === null ? "not finite" : `${number(tokens.logprobs[i])} (${number(100 * Math.exp(tokens.logprobs[i]), 3)} %)`],
      ["log-prob, trainer", tokens.trainer_logprobs ? number(tokens.trainer_logprobs[i]) : null],
      ["gap", tokens.trainer_logprobs ? number(tokens.trainer_logprobs[i] - tokens.logprobs[i]) : null],
      ["advantage", tokens.advantage ? number(tokens.advantage[i]) : null],
      ["entropy", tokens.entropy ? `${number(tokens.entropy[i])} nats` : null],
      ["version", tokens.versions[i]],
      ["drafts", tokens.drafted ? DRAFTED[tokens.drafted[i]][0] : null],
    ] : []),
  ].filter(([, value]) => value !== null);
  return html`<div class="about" role="status"><code class="token-text">${tokenText(tokens.texts[i])}</code><dl>${rows.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></div>`;
}

function TokenMap({ tokens, onPage }) {
  const [wanted, setColour] = useKept("colour", "logprob");
  const [at, setAt] = useState(null);
  const place = useRef();
  const dark = isDark();
  const usable = useMemo(() => Object.fromEntries(Object.keys(COLOURS).map((name) => [name, scale(name, tokens)])), [tokens]);
  const colour = usable[wanted]?.known ? wanted : "logprob";
  const { at: places, most, least } = usable[colour];
  const { signed, low, high, kinds } = COLOURS[colour];
  const starts = new Map(tokens.turns.map(([role, start]) => [start - tokens.start, role]));
  useEffect(() => setAt(null), [tokens]);
  const step = (by) => {
    const next = Math.min(Math.max((at ?? -1) + by, 0), tokens.ids.length - 1);
    setAt(next);
    place.current.querySelector(`[data-at="${next}"]`)?.scrollIntoView({ block: "nearest" });
  };
  // The spans are made once for a colouring; what the pointer is at changes one class.
  const spans = useMemo(() => tokens.ids.map((_, i) => html`${starts.has(i) && html`<span class=${`role ${starts.get(i)}`}>${starts.get(i)}</span>`}<span
    class=${`token${tokens.mask[i] ? "" : " context"}`} data-at=${i} style=${{ background: ground(places[i], COLOURS[colour], dark) }}>${tokenText(tokens.texts[i])}</span>`), [tokens, colour, dark]);
  useEffect(() => {
    const marked = place.current?.querySelector(`[data-at="${at}"]`);
    marked?.classList.add("at");
    return () => marked?.classList.remove("at");
  }, [at, spans]);
  const point = (event) => { const token = event.target.closest("[data-at]"); if (token) setAt(Number(token.dataset.at)); };
  const end = tokens.start + tokens.ids.length;
  return html`
    <div class="bar-of-controls">
      <div class="chips" role="group" aria-label="Colour by">${Object.entries(COLOURS).map(([name, { title }]) => html`<button class="chip" aria-pressed=${colour === name} disabled=${!usable[name].known}
        title=${usable[name].known ? "" : "not recorded for this completion"} onClick=${() => setColour(name)}>${title}</button>`)}</div>
      <span class="scale">${kinds ? DRAFTED.slice(1).map(([what, hue]) => html`<i class="kind" style=${{ background: `color-mix(in srgb, ${hue} 45%, transparent)` }}></i> ${what}`) : signed ? html`${low} <i class="signed"></i> ${high}, up to ±${number(most, 3)}` : html`${low} <i></i> ${high}${colour === "logprob" ? ", up to 4 nats" : colour === "version" ? `, ${least} to ${most}` : colour === "mask" ? "" : `, up to ${number(most, 3)}`}`}</span>
    </div>
    <div class="token-page">
      <div class="tokens" ref=${place} tabindex="0" aria-label="Tokens" onMouseOver=${point} onClick=${point}
        onKeyDown=${(event) => { if (event.key === "ArrowRight" || event.key === "ArrowLeft") { step(event.key === "ArrowRight" ? 1 : -1); event.preventDefault(); } }}>${spans}</div>
      <${About} tokens=${tokens} at=${at} />
    </div>
    ${tokens.total > tokens.ids.length && html`<p class="hint">Tokens ${tokens.start} to ${end - 1} of ${tokens.total}.
      <button disabled=${!tokens.start} onClick=${() => onPage(Math.max(0, tokens.start - 4000))}>Earlier</button>
      <button disabled=${end >= tokens.total} onClick=${() => onPage(end)}>Later</button></p>`}`;
}

function Turn({ node, here }) {
  const [open, setOpen] = useState(node.text.length < 4000);
  const mine = node.paths.includes(here);
  return html`<div class=${`turn ${node.role}${mine ? " mine" : ""}`}>
    <button class="head turn-head" aria-expanded=${open} onClick=${() => setOpen(!open)}>${open ? "▾" : "▸"} <b>${shown(node.role)}</b>
      <small>${node.tokens} tokens${node.logprob !== null ? `, mean log-prob ${number(node.logprob, 3)}` : ""}${node.paths.length > 1 ? `, shared by ${node.paths.length} paths` : ""}</small></button>
    ${open && html`<pre class="turn-text">${shown(node.text)}${node.left_out ? html`<span class="odd">and ${node.left_out} characters more</span>` : null}</pre>`}
  </div>`;
}

// A chain of turns is one list; only where paths part is there another level.
function Branch({ node, run, of, step, here }) {
  const chain = [node];
  while (chain.at(-1).children.length === 1 && !chain.at(-1).ends.length) chain.push(chain.at(-1).children[0]);
  const last = chain.at(-1);
  return html`<div class="branch">${chain.map((each) => html`<${Turn} node=${each} here=${here} />`)}
    ${last.ends.map((end) => html`<p class="end">end of <a href=${link("rollout", { run, of, step, offset: end.offset, id: end.id, view: "turns" })} aria-current=${end.id === here ? "true" : null}>${shown(end.id)}</a>
      <${Reward} value=${end.reward} /> ${end.stop}</p>`)}
    ${last.children.length > 0 && html`<div class="branches">${last.children.map((child) => html`<${Branch} node=${child} run=${run} of=${of} step=${step} here=${here} />`)}</div>`}</div>`;
}

function Tree({ run, of, step, offset, id }) {
  const { data, error } = useAsk("episode", { run, of, step, offset, id });
  if (error) return html`<${Problem} text=${error} />`;
  if (!data) return html`<p class="loading">Reading the turns</p>`;
  return html`<div class="tree">${data.trees.map((tree) => html`<${Branch} node=${tree} run=${run} of=${of} step=${step} here=${id} />`)}</div>`;
}

// Pictures of the task and of later turns, with the boxes and points of the answer.
function Pictures({ pictures }) {
  if (!pictures.length) return null;
  return html`<div class="pictures">${pictures.map((one) => (one.data ? html`<figure style=${{ width: `${one.width}px` }}><img src=${one.data} width=${one.width} height=${one.height} alt=${one.turn ? `A picture after turn ${one.turn}` : "A picture of the task"} title=${one.turn ? `after turn ${one.turn}` : null} />
    ${one.boxes.map((box) => html`<i class=${box.width || box.height ? "box" : "box point"} style=${{ left: `${box.x}px`, top: `${box.y}px`, width: `${box.width}px`, height: `${box.height}px` }}></i>`)}</figure>`
    : html`<p class="hint">${one.note}</p>`))}</div>`;
}

function Facts({ one, run, of }) {
  const parts = Object.entries(one.reward_parts);
  const info = Object.entries(one.info).filter(([, value]) => value !== null);
  return html`<dl class="facts">
    <div><dt>Reward</dt><dd><${Reward} value=${one.reward} /></dd></div>
    ${parts.map(([name, value]) => html`<div><dt>${shown(name)}</dt><dd>${number(value, 3)}</dd></div>`)}
    <div><dt>Tokens</dt><dd>${one.length}</dd></div><div><dt>Ended by</dt><dd>${one.stop}</dd></div>
    ${one.source !== "usual" && html`<div><dt>Kind</dt><dd>${one.source}</dd></div>`}
    <div><dt>Temperature</dt><dd>${number(one.temperature, 3)}</dd></div>
    ${Object.entries(one.timings).map(([name, value]) => html`<div><dt>${shown(name)}</dt><dd>${duration(value)}</dd></div>`)}
    <div><dt>Task</dt><dd><a href=${link("run", { run, tab: "rollouts", of, task: one.task })}>${shown(one.task)}</a></dd></div>
  </dl>${info.length > 0 && html`<details class="info"><summary>Further details</summary><dl class="facts">${info.map(([name, value]) => html`<div><dt>${shown(name)}</dt><dd>${shown(typeof value === "string" ? value : JSON.stringify(value))}</dd></div>`)}</dl></details>`}`;
}

// What people say about the completion; a running or a later run learns from it.
function Feedback({ run, one }) {
  const [turn, setTurn] = useState(0);
  const [problem, setProblem] = useState(null);
  const [answer, setAnswer] = useState(null);
  const { data, error } = useAsk("feedback", { run, id: one.id }, turn);
  const act = async (...request) => {
    try {
      await ask("feedback", ...request);
      setProblem(null);
      setAnswer(null);
    } catch (failed) {
      setProblem(failed.message);
    }
    setTurn((now) => now + 1);
  };
  const say = (what) => act({ run }, { method: "POST", body: { completion: one.id, step: one.step, ...what } });
  const mine = data?.said.findLast((each) => each.act === "rate" && each.author === data.author)?.rating;
  return html`<details class="info feedback"><summary>Feedback${data?.said.length ? ` (${data.said.length})` : ""}</summary>
    <${Problem} text=${problem ?? error} />
    <div class="bar-of-controls"><span class="stars" role="group" aria-label="Rating">${[1, 2, 3, 4, 5].map((star) => html`<button class="quiet star" aria-label=${`${star} of 5 stars`}
        aria-pressed=${mine !== undefined && mine * 4 + 1 >= star} onClick=${() => say({ rating: (star - 1) / 4 })}>${mine !== undefined && mine * 4 + 1 >= star ? "★" : "☆"}</button>`)}</span>
      ${answer === null && html`<button onClick=${() => setAnswer(one.response ?? "")}>Write a better answer</button>`}</div>
    ${answer !== null && html`<label class="answer">A better answer <textarea rows="6" value=${answer} onInput=${(event) => setAnswer(event.target.value)}></textarea></label>
      <div class="bar-of-controls"><button onClick=${() => say({ text: answer })}>Save answer</button><button class="quiet" onClick=${() => setAnswer(null)}>Cancel</button></div>`}
    ${data?.said.length > 0 && html`<ul class="said">${data.said.map((each) => html`<li key=${each.id}><b>${shown(each.author)}</b> ${each.act === "rate" ? `rated it ${number(each.rating)}` : each.act === "edit" ? "wrote a better answer" : shown(each.act)}
      <small> ${clock(each.at)}</small> <button class="quiet" onClick=${() => act({ run, id: each.id }, { method: "DELETE" })}>Undo</button></li>`)}</ul>`}
    <p class="hint">Stored in the run’s buffer, as by <code>rollmill feedback</code>.</p></details>`;
}

export function RolloutPage({ params }) {
  const run = params.get("run"), of = params.get("of"), id = params.get("id");
  const step = Number(params.get("step")), offset = Number(params.get("offset"));
  const view = params.get("view") === "turns" ? "turns" : "tokens";
  const [start, setStart] = useState(0);
  const { data: one, error, stale } = useAsk("rollout", { run, of, step, offset, id, start });
  useEffect(() => setStart(0), [run, of, step, offset, id]);
  const [before, after] = neighbours(run, of, step, offset);
  const to = (row) => link("rollout", { run, of, step: row.step, offset: row.offset, id: row.id, view: view === "turns" ? "turns" : "" });
  const show = (name) => go("rollout", { run, of, step, offset, id, view: name === "turns" ? "turns" : "" }, { replace: true });
  if (error && !one) return html`<${Problem} text=${error} />`;
  if (!one) return html`<p class="loading">Reading the completion</p>`;
  return html`
    <h1>${shown(one.id)} <small>${of ? "evaluation after " : ""}step ${one.step}</small></h1>
    <div class="bar-of-controls">
      <a class="button" href=${link("run", { run, tab: "rollouts", of })}>All completions</a>
      ${before && html`<a class="button" data-previous href=${to(before)}>← Previous</a>`}
      ${after && html`<a class="button" data-next href=${to(after)}>Next →</a>`}
    </div>
    <${Problem} text=${error} />
    <${Facts} one=${one} run=${run} of=${of} />
    <${Pictures} pictures=${one.pictures} />
    ${!of && html`<${Feedback} key=${one.id} run=${run} one=${one} />`}
    <div class="tabs" role="tablist">
      <button role="tab" aria-selected=${view === "tokens"} onClick=${() => show("tokens")}>Tokens</button>
      <button role="tab" aria-selected=${view === "turns"} onClick=${() => show("turns")}>Turns</button></div>
    <div class=${`tab${stale ? " stale" : ""}`} role="tabpanel">${view === "tokens" ? html`<${TokenMap} tokens=${one} onPage=${setStart} />` : html`<${Tree} run=${run} of=${of} step=${step} offset=${offset} id=${id} />`}</div>`;
}

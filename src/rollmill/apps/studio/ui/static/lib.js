// What all pages share: rendering, requests, addresses, and how numbers and texts of models are written.
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);

// -- requests --------------------------------------------------------------------------------------------------

export async function ask(path, params = {}, { signal, method = "GET", body } = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "") query.append(name, each);
    }
  }
  let answer, found;
  try {
    answer = await fetch(`/api/${path}?${query}`, { signal, method, ...(body ? { body: JSON.stringify(body), headers: { "content-type": "application/json" } } : {}) });
    found = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(answer ? `the server answered with status ${answer.status}` : "the server does not answer: is `rollmill ui` still running?");
  }
  if (!answer.ok) throw new Error(found.error);
  return found;
}

// Ask whenever `params` or `revision` change. The last answer stays until the next one is there; one of other
// `params` is `stale`.
export function useAsk(path, params, revision = 0) {
  const [state, setState] = useState({ data: null, error: null, key: null });
  const key = JSON.stringify([path, params]);
  useEffect(() => {
    if (params === null) return undefined;
    const control = new AbortController();
    ask(path, params, { signal: control.signal }).then(
      (data) => setState({ data, error: null, key }),
      (error) => error.name === "AbortError" || setState((old) => ({ ...old, error: error.message, key })),
    );
    return () => control.abort();
  }, [key, revision]);
  return { ...state, stale: state.key !== key };
}

// Call `act` now and then again and again, `seconds` after it was done; not while the page is hidden.
export function usePoll(act, seconds, deps) {
  const latest = useRef(act);
  latest.current = act;
  useEffect(() => {
    let timer, ended = false;
    const next = async () => {
      if (!document.hidden) await latest.current();
      if (!ended) timer = setTimeout(next, seconds * 1000);
    };
    next();
    return () => { ended = true; clearTimeout(timer); };
  }, deps);
}

// -- addresses -------------------------------------------------------------------------------------------------

export function address() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { path: path || "runs", params: new URLSearchParams(query) };
}

export function link(path, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) {
      if (each !== undefined && each !== null && each !== "" && each !== false) query.append(name, each);
    }
  }
  const text = query.toString();
  return `#/${path}${text ? `?${text}` : ""}`;
}

export function go(path, params, { replace = false } = {}) {
  const to = link(path, params);
  if (replace) {
    history.replaceState(null, "", to);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else location.hash = to;
}

export function useAddress() {
  const [found, setFound] = useState(address);
  useEffect(() => {
    const moved = () => setFound(address());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  return found;
}

// -- what the browser keeps ------------------------------------------------------------------------------------

export function kept(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(`rollmill.${name}`)) ?? otherwise; } catch { return otherwise; }
}

export function keep(name, value) {
  try { localStorage.setItem(`rollmill.${name}`, JSON.stringify(value)); } catch { /* private windows keep nothing */ }
}

export function useKept(name, otherwise) {
  const [value, setValue] = useState(() => kept(name, otherwise));
  return [value, (now) => { keep(name, now); setValue(now); }];
}

// -- numbers and times -----------------------------------------------------------------------------------------

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-4) return value.toExponential(2).replace("e+", "e");
  if (Number.isInteger(value)) return String(value);
  return String(Number(value.toPrecision(digits)));
}

export function count(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  for (const [unit, at] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (size >= at) return `${Number((value / (unit === "k" ? 1e3 : at)).toPrecision(3))}${unit}`;
  }
  return String(Number(value.toPrecision(4)));
}

export function bytes(value) {
  for (const [unit, at] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (value >= at) return `${Number((value / at).toPrecision(3))} ${unit}`;
  }
  return `${value} B`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const s = Math.max(0, seconds);
  if (s === 0) return "0 s";
  if (s < 0.1) return `${number(s * 1000, 3)} ms`;
  if (s < 90) return `${number(s, 3)} s`;
  if (s < 5400) return `${s < 600 ? Math.round(s / 6) / 10 : Math.round(s / 60)} min`;
  if (s < 172800) return `${number(s / 3600, 3)} h`;
  return `${number(s / 86400, 3)} days`;
}

export function ago(time, now) {
  return time ? `${duration(Math.max(0, Math.round(now - time)))} ago` : "–";
}

export function clock(time) {
  return time ? new Date(time * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" }) : "–";
}

// -- texts of models -------------------------------------------------------------------------------------------

// Control characters, direction marks and invisible characters would mislead a reader: they are spelled out.
const ODD = /([\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff\u{e0000}-\u{e007f}]+)/u;

function spelled(text) {
  return [...text].map((each) => {
    const code = each.codePointAt(0);
    if (code < 256) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code < 65536 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  }).join("");
}

export function plain(text) {
  return String(text).split(ODD).map((piece, at) => (at % 2 ? spelled(piece) : piece)).join("");
}

export function shown(text) {
  return String(text).split(ODD).map((piece, at) => (at % 2 ? html`<span class="odd">${spelled(piece)}</span>` : piece));
}

// -- small parts -----------------------------------------------------------------------------------------------

export function Problem({ text }) {
  return text ? html`<p class="problem" role="alert">${plain(text)}</p>` : null;
}

export function Badge({ state }) {
  return html`<span class=${`badge ${state}`}>${state}</span>`;
}

export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

// Colours of lines, told apart with most kinds of colour blindness; each has a light and a dark form.
const LINES = [
  ["#2563eb", "#6ea8fe"], ["#d9480f", "#ff9f5a"], ["#0b8a5f", "#4fd1a1"], ["#a21caf", "#e58cf0"],
  ["#8a6d00", "#e8c547"], ["#0e7490", "#5fd3ea"], ["#b91c1c", "#ff8a8a"], ["#4b5563", "#b3bcc9"],
];

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function lineColour(index, dark = isDark()) {
  return LINES[index % LINES.length][dark ? 1 : 0];
}

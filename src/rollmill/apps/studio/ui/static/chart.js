// A line chart with uPlot: several lines over one axis, bands, smoothing, zoom, and a cursor shared by all charts.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, duration, html, isDark, lineColour, number } from "./lib.js";

const SYNC = window.uPlot.sync("rollmill");

const WHOLE = [...Array(10).keys()].flatMap((power) => [1, 2, 5].map((each) => each * 10 ** power));

// Exponential moving average without the bias of its first points (as in TensorBoard); empty points are left out.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

// Bounds of the y axis; a line that never moves is in the middle.
function around(_, low, high) {
  if (low === null || high === null) return [0, 1];
  if (low === high) { const margin = Math.abs(low) / 10 || 1; return [low - margin, high + margin]; }
  return window.uPlot.rangeNum(low, high, 0.1, true);
}

export function axisValue(x, value) {
  if (value === null || value === undefined) return "–";
  return x === "seconds" ? duration(value) : x === "tokens" ? count(value) : String(Math.round(value * 10) / 10);
}

function alpha(colour, share) {
  return colour + Math.round(255 * share).toString(16).padStart(2, "0");
}

// Lines of one chart as uPlot wants them. Each of `lines` is {label, colour, dash, x, y, low, high, dots, own}; the
// legend shows `own` in place of `y` (all lines then have the same `x`).
function aligned(lines, weight) {
  const dark = isDark();
  const tables = [], series = [{ label: "x" }], bands = [];
  for (const line of lines) {
    const colour = lineColour(line.colour, dark);
    const table = [line.x];
    const few = line.dots || line.y.length < 40;
    const points = { show: few, size: few ? 5 : 3, fill: colour, stroke: colour };
    if (line.low) {
      table.push(line.high, line.low);
      bands.push({ series: [series.length, series.length + 1], fill: alpha(colour, 0.16) });
      for (const edge of ["high", "low"]) series.push({ label: `${line.label} ${edge}`, stroke: "transparent", points: { show: false }, spanGaps: true, edge: true });
    }
    if (weight && !line.dots) {
      table.push(line.y);
      series.push({ label: `${line.label} raw`, stroke: alpha(colour, 0.28), width: 1, points: { show: false }, spanGaps: true, edge: true });
    }
    table.push(line.dots ? line.y : smooth(line.y, weight));
    series.push({ label: line.label, stroke: colour, width: 1.8, dash: line.dash, points, spanGaps: true,
      value: (_, value) => number(value) });
    tables.push(table);
  }
  return { data: window.uPlot.join(tables), series, bands };
}

function options({ x, log, width, height, range, onZoom, unit }, { series, bands }) {
  const style = getComputedStyle(document.documentElement);
  const [ink, grid] = [style.getPropertyValue("--soft").trim(), style.getPropertyValue("--grid").trim()];
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
  series[0].value = (_, value) => axisValue(x, value);
  const write = unit ?? ((value) => number(value, 3));
  return {
    width, height, bands, padding: [10, 12, 0, 0],
    series: series.map((each) => ({ ...each, edge: undefined })),
    scales: { x: { time: false, ...(range ? { range: () => range } : {}) }, y: log ? { distr: 3 } : { range: around } },
    axes: [{ ...axis, size: 26, gap: 3, space: 56, ...(x === "step" ? { incrs: WHOLE } : {}), values: (_, all) => all.map((value) => axisValue(x, value)) },
      { ...axis, size: (_, texts) => Math.max(40, 14 + 6.3 * Math.max(0, ...(texts ?? []).map((text) => text.length))), gap: 3, space: 34, values: (_, all) => all.map((value) => (value === null ? "" : write(value))) }],
    cursor: { sync: { key: SYNC.key, setSeries: false }, drag: { x: true, y: false, setScale: false }, focus: { prox: 24 },
      points: { size: 6 } },
    legend: { show: false },
    focus: { alpha: 0.35 },
    hooks: {
      setSelect: [(plot) => {
        if (plot.select.width > 3 && onZoom) onZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
        plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
      }],
    },
  };
}

// The values under the cursor, or the last ones, in words below the chart.
function Legend({ lines, values }) {
  return html`<ul class="legend">${lines.map((line, at) => html`<li key=${line.label} title=${line.label}>
    <i style=${{ background: lineColour(line.colour), opacity: line.dash ? 0.55 : 1 }}></i><span>${line.label}</span><b>${number(values[at])}</b></li>`)}</ul>`;
}

function lastValues(lines, weight) {
  return lines.map((line) => line.own?.at(-1) ?? (line.dots ? line.y : smooth(line.y, weight)).at(-1) ?? null);
}

export function Chart({ title, note, lines, x = "step", weight = 0, log = false, range = null, onZoom, height = 190, unit, stale }) {
  const place = useRef(), plot = useRef(null);
  const [width, setWidth] = useState(0);
  const [cursor, setCursor] = useState(null);
  const theme = isDark();
  useEffect(() => {
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(place.current);
    return () => watch.disconnect();
  }, []);
  useEffect(() => {
    if (!width || !lines.length) return undefined;
    const usable = log ? lines.map((line) => ({ ...line, low: null, y: line.y.map((value) => (value > 0 ? value : null)) })) : lines;
    const made = aligned(usable, weight);
    const wanted = options({ x, log, width, height, range, onZoom, unit }, made);
    const drawn = made.series.map((each, at) => (at && !each.edge ? at : 0)).filter(Boolean);
    wanted.hooks.setCursor = [(now) => {
      const at = now.cursor.idx;
      if (at === null || at === undefined) return setCursor(null);
      // Lines have points at different places: of each, the nearest one before the cursor is shown.
      const values = drawn.map((number, line) => { if (usable[line].own) return usable[line].own[at]; let i = at; while (i > 0 && now.data[number][i] == null) i--; return now.data[number][i]; });
      return setCursor({ x: now.data[0][at], values });
    }];
    plot.current = new window.uPlot(wanted, made.data, place.current);
    return () => { plot.current.destroy(); plot.current = null; };
  }, [lines, width, weight, log, x, range?.[0], range?.[1], height, theme]);
  return html`<figure class=${`chart${stale ? " stale" : ""}`}>
    <figcaption><b title=${title}>${title}</b>${cursor ? html`<span class="at">${x} ${axisValue(x, cursor.x)}</span>` : note && html`<span class="at">${note}</span>`}</figcaption>
    <div class="plot" ref=${place} style=${{ minHeight: `${height}px` }} onDblClick=${() => onZoom?.(null)}></div>
    <${Legend} lines=${lines} values=${cursor ? cursor.values : lastValues(lines, weight)} />
  </figure>`;
}

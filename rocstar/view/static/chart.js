// One chart of one metric: a line for each run, stages behind it, warnings where they happened. uPlot draws.

import { explained, html, number, Term, useEffect, useGlossary, useRef, useState } from "./lib.js";

export const LINES = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5", "--line-6"];

/** A colour of the style sheet for a canvas, which knows no light-dark(). */
export function color(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** name: of the metric, as the glossary has it; `raw` shows it itself. series: [{ name, x, y, raw }], where `raw` is
 * what y was made smooth from, drawn faintly behind it. marks: [{ x, kind, text }] with kind `stage` or `warning`. */
export function Chart({ name, raw = false, series, marks = [], unit, sync = "run" }) {
  const box = useRef(null);
  const [at, setAt] = useState(null);
  const label = explained(useGlossary(), name)?.[0] ?? name;
  const lines = [...series.map(linesOf).flat(), ...series.map(({ x, y }, place) => ({ x, y, place }))];
  const drawn = [lines.map(({ x, y }) => [x.length, x.at(-1), y.at(-1)]), series.map((one) => one.name), marks.length];
  useEffect(() => {
    if (!box.current || !series.length) return;
    const data = uPlot.join(lines.map(({ x, y }) => [x, y]));
    const plot = new uPlot(options(box.current, lines, series.length, marks, sync, setAt, unit), data, box.current);
    const watcher = new ResizeObserver(() => plot.setSize({ width: box.current.clientWidth, height: 150 }));
    watcher.observe(box.current);
    return () => { watcher.disconnect(); plot.destroy(); };
  }, [JSON.stringify(drawn), document.documentElement.dataset.theme, unit]);
  const last = series.map(({ y }) => y.findLast((value) => value !== null));
  const value = ({ name: one }, place) => html`<span class="value line-${(place % LINES.length) + 1}" title=${one}>
    ${number(at ? at.values[place] : last[place])}</span>`;
  return html`<figure class="chart"><figcaption><b><${Term} name=${name} label=${raw ? name : label} /></b>
      <span class="values">${series.map(value)} ${at && html`<span class="dim">${unit} ${number(at.x)}</span>`}</span>
    </figcaption><div class="plot" ref=${box} role="img"
      aria-label=${`${label}: ${last.map((one) => number(one)).join(", ")} at the end`}></div></figure>`;
}

const linesOf = ({ x, raw }, place) => (raw ? [{ x, y: raw, place, faint: true }] : []);

// No tick between two steps.
const WHOLE = [0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((first) => first * 10 ** power));

/** From lowest to highest value with some air; the air of shares ends at 1. */
function range(plot, low, high) {
  if (low === null) return [0, 1];
  const [from, to] = uPlot.rangeNum(low, high, 0.1, true);
  return [from, high <= 1 ? Math.min(1, to) : to];
}

function options(box, lines, shown, marks, sync, setAt, unit) {
  const axis = {
    stroke: color("--dim"), grid: { stroke: color("--edge"), width: 1 }, ticks: { show: false }, font: "11px system-ui",
    values: (_, values) => values.map((value) => number(value)),
  };
  const line = ({ place, faint }) => ({
    stroke: color(LINES[place % LINES.length]), width: faint ? 1 : 1.6, alpha: faint ? 0.3 : 1, spanGaps: true,
    points: { show: !faint && lines[0].x.length < 3 },
  });
  const follow = (plot) => {
    const place = plot.cursor.idx;
    const values = () => plot.data.slice(-shown).map((column) => column[place]);
    setAt(place === null || place === undefined ? null : { x: plot.data[0][place], values: values() });
  };
  return {
    width: box.clientWidth,
    height: 150,
    padding: [marks.some(({ kind }) => kind === "stage") ? 18 : null, null, null, null],
    legend: { show: false },
    cursor: { sync: { key: sync }, points: { size: 5 }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range } },
    axes: [{ ...axis, size: 24, ...(unit.endsWith("step") && { incrs: WHOLE }) }, { ...axis, size: 46 }],
    series: [{}, ...lines.map(line)],
    hooks: { drawClear: [(plot) => drawMarks(plot, marks)], setCursor: [follow] },
  };
}

/** Lines over the plot; names of stages in the space above it, each only where it does not run into the next line. */
function drawMarks(plot, marks) {
  const { left, width } = plot.bbox;
  const placed = marks
    .map((mark) => ({ ...mark, at: Math.round(plot.valToPos(mark.x, "x", true)) }))
    .filter(({ at }) => at >= left && at <= left + width);
  const stages = placed.filter(({ kind }) => kind === "stage");
  const end = (mark) => stages[stages.indexOf(mark) + 1]?.at ?? plot.ctx.canvas.width;
  for (const mark of placed) draw(plot, mark, end(mark) - mark.at);
}

function draw(plot, { at, kind, text }, room) {
  const { top, height } = plot.bbox;
  const pen = plot.ctx;
  pen.save();
  pen.strokeStyle = pen.fillStyle = color(kind === "warning" ? "--warn" : "--stage");
  pen.setLineDash(kind === "warning" ? [] : [4, 4]);
  pen.lineWidth = devicePixelRatio;
  pen.beginPath();
  pen.moveTo(at, top);
  pen.lineTo(at, top + height);
  pen.stroke();
  pen.font = `${10 * devicePixelRatio}px system-ui`;
  pen.textBaseline = "bottom";
  if (kind === "warning") pen.fillText("▲", at - 4 * devicePixelRatio, top + height);
  else if (pen.measureText(text).width < room - 4 * devicePixelRatio)
    pen.fillText(text, at, top - 2 * devicePixelRatio);
  pen.restore();
}

/** A small curve without axes. */
export function Spark({ values, label }) {
  if (!values?.length) return html`<span class="dim">–</span>`;
  const low = Math.min(...values), high = Math.max(...values), span = high - low || 1;
  const x = (place) => (100 * place) / Math.max(1, values.length - 1);
  const points = values.map((value, place) => `${x(place)},${22 - (20 * (value - low)) / span}`).join(" ");
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" role="img"
    aria-label=${`${label} from ${number(values[0])} to ${number(values.at(-1))}`}>
    <polyline points=${points} vector-effect="non-scaling-stroke" /></svg>`;
}

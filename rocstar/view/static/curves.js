// Metrics over steps, of one run or several in the same plots.

import { Chart } from "./chart.js";
import { amend, html, ofRun, place, Problem, useAnswer, usePaused, visible } from "./lib.js";

const FIRST = [
  "reward/mean", "pass/mean", "loss", "len/tokens", "len/truncated", "tool/calls", "tool/error_rate",
  "tool/error_share_in_correct", "policy/entropy", "policy/logprob_gap", "roc/kept", "group/usable",
  "roc/penalty_right_kept", "learn/grad_norm", "step/seconds", "step/tokens_per_second",
];
const AXES = { step: "step", rl: "RL step", hours: "hours", tokens: "million tokens" };
const SMOOTH = [3, 5, 10, 20, 50];
const MOST_METRICS = 48;
const MOST_OTHERS = 5; // as many lines as there are colours, less the run's own

export function Curves({ name, run }) {
  const { query } = place();
  const others = (query.with || "").split(",").filter(Boolean).slice(0, MOST_OTHERS);
  const words = usePaused(query.metric || "").toLowerCase().split(/\s+/).filter(Boolean);
  const fitting = run.metrics.filter((metric) => words.every((word) => metric.toLowerCase().includes(word)));
  const all = words.length ? fitting.slice(0, MOST_METRICS) : FIRST.filter((metric) => run.metrics.includes(metric));
  const wanted = all.join(",");
  const live = { every: 3, again: () => run.state === "running" };
  const mine = useAnswer(ofRun(name, "curves"), { metrics: wanted }, live);
  const theirs = Array.from({ length: MOST_OTHERS }, (_, at) =>
    useAnswer(others[at] ? ofRun(others[at], "curves") : "", { metrics: wanted }, live));
  const axis = query.x in AXES ? query.x : "step";
  const span = SMOOTH.includes(+query.smooth) ? +query.smooth : 1;
  const answers = [mine, ...theirs].map(({ value }) => value);
  const loaded = [name, ...others].map((one, at) => ({ name: one, found: answers[at] })).filter(({ found }) => found);
  const plotted = (metric) => loaded
    .map(({ name: one, found }) => ({ name: one, ...smoothed(points(found, metric, axis), span) }))
    .filter(({ x }) => x.length);
  const bar = { name, run, query, axis, span, others, loaded };
  return html`<${Bar} ...${bar} />
    <${Problem} error=${mine.error || theirs.find(({ error }) => error)?.error} />
    <div class="charts">${mine.value && all.map((metric) => {
      const series = plotted(metric);
      return series.length > 0 && html`<${Chart} key=${metric + axis + span} name=${metric} raw=${words.length > 0}
        unit=${AXES[axis]} marks=${marks(run, mine.value, axis)} series=${series} />`;
    })}</div>
    ${words.length > 0 && fitting.length > all.length && html`<p class="dim">
      the first ${MOST_METRICS} of ${fitting.length}</p>`}
    ${mine.value && !all.length && html`<p class="dim empty">
      ${run.metrics.length ? "no metric has such a name" : "no step is done yet"}</p>`}`;
}

function Bar({ name, run, query, axis, span, others, loaded }) {
  const known = useAnswer("sources");
  const without = (one) => amend({ with: others.filter((other) => other !== one).join(",") });
  const runs = (known.value?.sources || []).filter(({ kind }) => kind === "run").map((one) => one.name);
  const rest = runs.filter((one) => one !== name && !others.includes(one));
  return html`<div class="bar filters">
    <label>over <select value=${axis} onChange=${(e) => amend({ x: e.target.value })}>
      ${Object.entries(AXES).map(([id, label]) => html`<option value=${id}>${label}</option>`)}</select></label>
    <label>smoothing <select value=${span > 1 ? span : ""} onChange=${(e) => amend({ smooth: e.target.value })}>
      <option value="">none</option>
      ${SMOOTH.map((steps) => html`<option value=${steps}>mean of ${steps} steps</option>`)}</select></label>
    <input type="search" id="search" aria-label="Metrics whose name has" value=${query.metric || ""}
      placeholder=${`${run.metrics.length} metrics: name …  /`}
      onInput=${(e) => amend({ metric: e.target.value }, { keep: false })} />
    ${loaded.map(({ name: one }, at) => html`<span class="chip line-${at + 1}">● ${visible(one)}
      ${at > 0 && html` <button aria-label=${"without " + one} onClick=${() => without(one)}>×</button>`}</span>`)}
    ${rest.length > 0 && others.length < MOST_OTHERS && html`<select aria-label="Compare with" value=""
        onChange=${(e) => amend({ with: [...others, e.target.value].join(",") })}>
      <option value="">compare with …</option>
      ${rest.map((one) => html`<option value=${one}>${visible(one)}</option>`)}</select>`}
    ${others.length === MOST_OTHERS && html`<span class="dim">${MOST_OTHERS + 1} runs are the most</span>`}</div>`;
}

function points(found, metric, axis) {
  const values = found.columns[metric] || [], along = found.axes[axis];
  const places = [...values.keys()].filter((at) => values[at] !== null && along[at] !== null);
  const rising = places.filter((at, n) => n === 0 || along[at] > along[places[n - 1]]);
  return { x: rising.map((at) => along[at]), y: rising.map((at) => values[at]) };
}

/** Each point as the mean of itself and of those before it, `span` in all; `raw` has them as they were. */
export function smoothed({ x, y }, span) {
  if (span < 2) return { x, y };
  let sum = 0;
  const means = y.map((value, at) => {
    sum += value - (at >= span ? y[at - span] : 0);
    return sum / Math.min(span, at + 1);
  });
  return { x, y: means, raw: y };
}

function marks(run, found, axis) {
  const at = (step) => found.axes[axis][found.axes.step.findIndex((one) => one >= step)];
  const stages = found.spans.slice(1).map((span) => ({ x: at(span.first), kind: "stage", text: span.name }));
  const warnings = (run.events || [])
    .filter(({ event, step }) => event === "warning" && step)
    .map(({ step, evidence }) => ({ x: at(step), kind: "warning", text: evidence }));
  return [...stages, ...warnings].filter(({ x }) => x !== undefined && x !== null);
}

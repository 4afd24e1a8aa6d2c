// A run: curves of one or more runs, stages, evaluations, events, settings.

import { Chart } from "./chart.js";
import { ago, amend, Figure, html, link, number, ofRun, place, Problem, State, useAnswer, useEffect, usePaused, useRef, visible } from "./lib.js";

const FIRST = [
  ["reward/mean", "mean reward"], ["pass/mean", "solved problems"], ["loss", "loss, cold start"], ["len/tokens", "tokens an attempt"], ["len/truncated", "cut attempts"],
  ["tool/calls", "tool calls an attempt"], ["tool/error_rate", "failed calls"], ["tool/error_share_in_correct", "right attempts with a failed call"],
  ["policy/entropy", "entropy, nats"], ["policy/logprob_gap", "engine − learner, nats"], ["roc/kept", "kept attempts"], ["group/usable", "usable groups"],
  ["roc/penalty_right_kept", "penalty of kept, right"], ["learn/grad_norm", "gradient norm"], ["step/seconds", "seconds a step"], ["step/tokens_per_second", "tokens/s"],
];
const AXES = { step: "step", rl: "RL step", hours: "hours", tokens: "million tokens" };
export const TABS = ["curves", "attempts", "groups", "evaluations", "events", "settings"];

export function Tabs({ name, tab }) {
  const bar = useRef(null);
  useEffect(() => { bar.current.scrollLeft = bar.current.querySelector("[aria-current]")?.offsetLeft - 60; }, [tab]); // a narrow screen holds four
  return html`<nav class="tabs" aria-label="Views of the run" ref=${bar}>${TABS.map((one) =>
    html`<a href=${link(one === "curves" ? ["run", name] : ["run", name, one])} aria-current=${one === tab ? "page" : undefined}>${one}</a>`)}</nav>`;
}

export function Run({ name, tab }) {
  const { value, error } = useAnswer(ofRun(name), {}, { every: 2, again: (run) => run.state === "running" });
  if (!value) return html`<${Problem} error=${error} />`;
  const view = { evaluations: Evaluations, events: Events, settings: Settings }[tab] || Curves;
  return html`<${Header} run=${value} /><${Tabs} name=${name} tab=${tab} /><${Problem} error=${error || value.broken || (value.reason && `failed: ${value.reason}`)} />
    ${value.broken_lines > 0 && html`<p class="problem">${value.broken_lines} lines of metrics.jsonl could not be read and are left out</p>`}
    <${view} name=${name} run=${value} />`;
}

function Header({ run }) {
  const step = run.last.step ?? 0;
  const spans = Object.fromEntries(run.spans.map((span) => [span.name, span.last - span.first + 1]));
  return html`<div class="bar"><h1>${visible(run.name)}</h1><${State} state=${run.state} /><span>step <b>${number(step)}</b> <span class="dim">of ${number(run.steps)}</span></span>
      <span class="dim">written ${ago(run.active)}</span></div>
    <ol class="stages" aria-label="Stages">${(run.stages || []).map((stage) => {
      const done = spans[stage.name] || 0;
      return html`<li style=${{ flexGrow: Math.max(1, stage.steps) }} class=${done >= stage.steps ? "over" : done ? "now" : ""}><span>${stage.name} <span class="dim">${stage.kind} · ${number(done)}/${number(stage.steps)}</span></span>
        <progress max=${stage.steps || 1} value=${done} aria-label=${`steps of ${stage.name}`}></progress></li>`;
    })}</ol>`;
}

function Curves({ name, run }) {
  const { query } = place();
  const others = (query.with || "").split(",").filter(Boolean).slice(0, 5);
  const words = usePaused(query.metric || "");
  const all = words
    ? run.metrics.filter((metric) => words.toLowerCase().split(/\s+/).every((word) => metric.toLowerCase().includes(word))).slice(0, 48).map((metric) => [metric, metric])
    : FIRST.filter(([metric]) => run.metrics.includes(metric));
  const wanted = all.map(([metric]) => metric).join(",");
  const live = { every: 3, again: () => run.state === "running" };
  const mine = useAnswer(ofRun(name, "curves"), { metrics: wanted }, live);
  const theirs = Array.from({ length: 5 }, (_, at) => useAnswer(others[at] ? ofRun(others[at], "curves") : "", { metrics: wanted }, live));
  const known = useAnswer("sources");
  const axis = query.x in AXES ? query.x : "step";
  const loaded = [{ name, found: mine.value }, ...others.map((other, at) => ({ name: other, found: theirs[at].value }))].filter(({ found }) => found);
  const rest = (known.value?.sources || []).filter((one) => one.kind === "run" && one.name !== name && !others.includes(one.name));
  return html`<div class="bar filters">
      <label>over <select value=${axis} onChange=${(e) => amend({ x: e.target.value })}>${Object.entries(AXES).map(([id, label]) => html`<option value=${id}>${label}</option>`)}</select></label>
      <input type="search" id="search" aria-label="Metrics whose name has" placeholder=${`${run.metrics.length} metrics: name …  /`} value=${query.metric || ""} onInput=${(e) => amend({ metric: e.target.value }, { keep: false })} />
      ${loaded.map(({ name: one }, at) => html`<span class="chip line-${at + 1}">● ${visible(one)}${at > 0 && html` <button aria-label=${"without " + one} onClick=${() => amend({ with: others.filter((other) => other !== one).join(",") })}>×</button>`}</span>`)}
      ${rest.length > 0 && html`<select aria-label="Compare with" value="" onChange=${(e) => amend({ with: [...others, e.target.value].join(",") })}><option value="">compare with …</option>${rest.map((one) => html`<option value=${one.name}>${visible(one.name)}</option>`)}</select>`}
    </div><${Problem} error=${mine.error || theirs.find(({ error }) => error)?.error} />
    <div class="charts">${mine.value && all.map(([metric, label]) => {
      const series = loaded.map(({ name: one, found }) => ({ name: one, ...points(found, metric, axis) })).filter(({ x }) => x.length);
      return series.length > 0 && html`<${Chart} key=${metric + axis} title=${label} unit=${AXES[axis]} marks=${marks(run, mine.value, axis)} series=${series} />`;
    })}</div>
    ${mine.value && !all.length && html`<p class="dim empty">${run.metrics.length ? "no metric has such a name" : "no step is done yet"}</p>`}`;
}

function points(found, metric, axis) {
  const values = found.columns[metric] || [];
  const places = [...values.keys()].filter((at) => values[at] !== null && found.axes[axis][at] !== null);
  const rising = places.filter((at, n) => n === 0 || found.axes[axis][at] > found.axes[axis][places[n - 1]]);
  return { x: rising.map((at) => found.axes[axis][at]), y: rising.map((at) => values[at]) };
}

function marks(run, found, axis) {
  const at = (step) => found.axes[axis][found.axes.step.findIndex((one) => one >= step)];
  const stages = found.spans.slice(1).map((span) => ({ x: at(span.first), kind: "stage", text: span.name }));
  const warnings = (run.events || []).filter(({ event, step }) => event === "warning" && step).map(({ step, evidence }) => ({ x: at(step), kind: "warning", text: evidence }));
  return [...stages, ...warnings].filter(({ x }) => x !== undefined && x !== null);
}

function Evaluations({ name, run }) {
  if (!run.evals.length) return html`<p class="dim empty">no evaluation is finished yet</p>`;
  const before = run.evals.find((one) => one.name === "before");
  return html`<table class="plain"><thead><tr><th>evaluation</th><th>step</th><th>right, with 95% interval</th><th>greedy</th><th>compare</th></tr></thead><tbody>${run.evals.map((one) => html`<tr key=${one.name + one.step}>
    <td data-label="evaluation"><a class="open" href=${link(["eval", name, one.name, one.step])}>${visible(one.name)}</a></td><td data-label="step">${number(one.step)}</td><td data-label="right"><${Figure} figure=${one.accuracy} /></td><td data-label="greedy">${one.greedy ? html`<${Figure} figure=${one.greedy} />` : html`<span class="dim">–</span>`}</td>
    <td data-label="compare">${before && before !== one && before.asked === one.asked ? html`<a href=${link(["eval", name, one.name, one.step], { against: `${name}/before/${before.step}` })}>with before</a>` : html`<span class="dim">–</span>`}</td></tr>`)}</tbody></table>`;
}

function Events({ name, run }) {
  if (!run.events?.length) return html`<p class="dim empty">nothing happened that is worth a line</p>`;
  return html`<table class="plain events"><thead><tr><th>when</th><th>step</th><th>event</th><th>what</th></tr></thead><tbody>${[...run.events].reverse().map((event) => {
    const { time, event: kind, step, ...rest } = event;
    return html`<tr class=${kind === "warning" || kind === "stall" || kind === "faults" ? "alarm" : ""}><td data-label="when" class="dim">${time ? new Date(time * 1000).toLocaleString() : "–"}</td>
      <td data-label="step">${step ? html`<a href=${link(["run", name, "attempts"], { step })}>${number(step)}</a>` : html`<span class="dim">–</span>`}</td><td data-label="event">${kind === "warning" ? "▲ warning" : visible(kind)}</td>
      <td data-label="what">${rest.evidence ? visible(`${rest.evidence}; ${rest.action}`) : visible(Object.entries(rest).map(([key, value]) => `${key}: ${typeof value === "object" ? JSON.stringify(value) : value}`).join(" · "))}</td></tr>`;
  })}</tbody></table>`;
}

function Settings({ run }) {
  const { query } = place();
  const words = (query.q || "").toLowerCase();
  const rows = [...leaves({ run: run.identity, settings: run.settings })].filter(([key, value]) => `${key} ${value}`.toLowerCase().includes(words));
  return html`<div class="bar filters"><input type="search" id="search" aria-label="Settings that have" placeholder="name or value …  /" value=${query.q || ""} onInput=${(e) => amend({ q: e.target.value }, { keep: false })} /></div>
    <table class="plain settings"><tbody>${rows.map(([key, value]) => html`<tr><th scope="row">${visible(key)}</th><td>${visible(value)}</td></tr>`)}</tbody></table>`;
}

function* leaves(value, before = "") {
  if (value && typeof value === "object" && Object.keys(value).length) for (const [key, inner] of Object.entries(value)) yield* leaves(inner, before ? `${before}.${inner?.name && Array.isArray(value) ? inner.name : key}` : key);
  else if (value !== undefined) yield [before, JSON.stringify(value)];
}

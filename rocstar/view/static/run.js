// A run: how far it came, before against after, and its views.

import { Curves } from "./curves.js";
import {
  ago, Figure, html, link, number, ofRun, percent, Problem, State, Term, useAnswer, useEffect, useRef, visible,
} from "./lib.js";
import { Evaluations, Events, Settings } from "./records.js";
import { Time } from "./time.js";

const TABS = ["curves", "time", "attempts", "groups", "evaluations", "events", "settings"];
const OF_OTHERS = ["curves", "attempts", "groups", "settings"];

/** Whether a name is that of rollouts that another trainer wrote. */
export const ofOthers = (name) => name.startsWith("file:");
const BESIDE = ["greedy", "tool_error_share_in_correct", "no_tool_share", "mean_response_tokens"];
const OF_HELD_OUT = ["before", "during", "after"];

export function Tabs({ name, tab }) {
  const bar = useRef(null);
  useEffect(() => { // a narrow screen holds four
    bar.current.scrollLeft = bar.current.querySelector("[aria-current]")?.offsetLeft - 60;
  }, [tab]);
  const tabs = ofOthers(name) ? OF_OTHERS : TABS;
  return html`<nav class="tabs" aria-label="Views of the run" ref=${bar}>${tabs.map((one) => html`
    <a href=${link(one === "curves" ? ["run", name] : ["run", name, one])}
      aria-current=${one === tab ? "page" : undefined}>${one}</a>`)}</nav>`;
}

export function Run({ name, tab }) {
  const { value, error } = useAnswer(ofRun(name), {}, { every: 2, again: (run) => run.state === "running" });
  if (!value) return html`<${Problem} error=${error} />`;
  const view = { time: Time, evaluations: Evaluations, events: Events, settings: Settings }[tab] || Curves;
  const broken = value.broken_lines;
  return html`<${Header} run=${value} /><${Tabs} name=${name} tab=${tab} />
    <${Problem} error=${error || value.broken || (value.reason && `failed: ${value.reason}`)} />
    ${broken > 0 && html`<p class="problem">${broken} lines of metrics.jsonl could not be read and are left out</p>`}
    <${view} name=${name} run=${value} />`;
}

function Header({ run }) {
  const { about } = run;
  if (about) return html`<div class="bar"><h1>${visible(run.name)}</h1>
    <span>${number(about.attempts)} attempts, written by ${visible(about["written by"])}</span></div>
    ${run.refused.map((said) => html`<${Problem} error=${`left out: ${said}`} />`)}`;
  const step = run.last.step ?? 0;
  const of = run.state === "finished" ? "" : html` <span class="dim">of ${number(run.steps)}</span>`;
  const sweep = run.sweep && html`<span>of sweep ${visible(run.sweep)}</span>`;
  return html`<div class="bar"><h1>${visible(run.name)}</h1><${State} state=${run.state} />
      <span>step <b>${number(step)}</b>${of}</span>${sweep}<span class="dim">written ${ago(run.active)}</span></div>
    <${Headline} run=${run} />
    <ol class="stages" aria-label="Stages">
      ${(run.stages || []).map((stage) => html`<${Stage} stage=${stage} />`)}</ol>`;
}

/** A stage that ended by its rule is as finished as one that did all its steps. */
function Stage({ stage: { name, kind, steps, done, ended } }) {
  const over = ended !== null || done >= steps;
  const early = ended !== null && done < steps;
  const told = over ? `✓ ${number(done)} ${done === 1 ? "step" : "steps"}` : `${number(done)}/${number(steps)}`;
  return html`<li style=${{ flexGrow: Math.max(1, over ? done : steps) }} class=${over ? "over" : done ? "now" : ""}>
    <span>${visible(name)} <span class="dim">${kind} · ${told}${early && ` of at most ${number(steps)}`}</span></span>
    <progress max=${over ? 1 : steps || 1} value=${over ? 1 : done} aria-label=${`steps of ${name}`}></progress>
    ${early && html`<span class="dim why">ended by its rule: ${visible(ended)}</span>`}</li>`;
}

/** What training changed: the last evaluation of the held-out problems against the one before RL. */
function Headline({ run }) {
  const last = (name) => run.evals.filter((one) => one.name === name).at(-1);
  const before = last("before"), now = last("after") ?? last("during");
  if (!before && !now) return null;
  const gain = before?.accuracy && now?.accuracy && 100 * (now.accuracy.value - before.accuracy.value);
  const against = before && { against: `${run.name}/${before.name}/${before.step}` };
  const row = (label, one) => html`<span class="dim">${label}</span>
    ${one ? html`<${Figure} figure=${one.accuracy} />` : html`<span class="dim">not yet</span>`}`;
  return html`<section class="card headline" aria-label="Before and after">
    <div class="main"><b class="over"><${Term} name="accuracy" /></b>${row("before RL", before)}
      ${row(now && now.name !== "after" ? `at step ${number(now.step)}` : "after RL", now)}
      ${typeof gain === "number" && html`<span class="over"><b class=${gain < 0 ? "warn" : gain > 0 ? "good" : "dim"}>
          ${gain > 0 ? "+" : ""}${gain.toFixed(1)} points</b> ${" "}
        <a href=${link(["eval", run.name, now.name, now.step], against)}>problem by problem</a></span>`}</div>
    <dl>${BESIDE.map((key) => html`<${Pair} name=${key} before=${before?.[key]} now=${now?.[key]} />`)}
      ${benchmarks(run).map(({ name, first, end }) => html`<${Pair} name="accuracy"
        label=${`${name}, steps ${first.step} and ${end.step}`} before=${first.accuracy} now=${end.accuracy} />`)}
    </dl></section>`;
}

/** Evaluations that were made after several steps. */
function benchmarks(run) {
  const names = [...new Set(run.evals.map(({ name }) => name))].filter((name) => !OF_HELD_OUT.includes(name));
  return names
    .map((name) => run.evals.filter((one) => one.name === name))
    .filter((series) => series.length > 1)
    .map((series) => ({ name: series[0].name, first: series[0], end: series.at(-1) }));
}

function Pair({ name, label, before, now }) {
  const shown = (figure) => {
    const value = figure?.value ?? figure;
    return typeof value !== "number" ? "–" : name === "mean_response_tokens" ? number(value) : percent(value);
  };
  if (shown(before) === "–" && shown(now) === "–") return null;
  return html`<div><dt><${Term} name=${name} label=${label} /></dt>
    <dd>${shown(before)} → <b>${shown(now)}</b></dd></div>`;
}

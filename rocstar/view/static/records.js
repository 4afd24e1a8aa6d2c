// What a run wrote down beside its metrics: evaluations, events, settings.

import { Chart } from "./chart.js";
import { amend, Figure, html, link, number, ofRun, place, Problem, useAnswer, visible } from "./lib.js";

const DASH = html`<span class="dim">–</span>`;

export function Evaluations({ name, run }) {
  if (!run.evals.length) return html`<p class="dim empty">no evaluation is finished yet</p>`;
  const evals = [...run.evals].sort((a, b) => a.step - b.step);
  return html`<${Course} evals=${evals} />
    <table class="plain"><thead><tr><th>evaluation</th><th>step</th><th>right, with 95% interval</th><th>greedy</th>
      <th>compare with</th></tr></thead><tbody>${evals.map((one) => html`<tr key=${one.name + one.step}>
        <td data-label="evaluation">
          <a class="open" href=${link(["eval", name, one.name, one.step])}>${visible(one.name)}</a></td>
        <td data-label="step">${number(one.step)}</td>
        <td data-label="right"><${Figure} figure=${one.accuracy} /></td>
        <td data-label="greedy">${one.greedy ? html`<${Figure} figure=${one.greedy} />` : DASH}</td>
        <td data-label="compare with">${earlier(evals, one).map((other) => html`
          <a href=${link(["eval", name, one.name, one.step], { against: `${name}/${other.name}/${other.step}` })}>
            ${visible(other.name)} at step ${number(other.step)}</a>${" "}`)}${!earlier(evals, one).length && DASH}</td>
      </tr>`)}</tbody></table>`;
}

/** The first evaluation of the same problems and the last one, of those that were made before. */
function earlier(evals, one) {
  const same = evals.slice(0, evals.indexOf(one)).filter((other) => other.asked === one.asked);
  return [...new Set([same[0], same.at(-1)])].filter(Boolean);
}

/** Right answers over steps, of each evaluation of the same problems that was made more than once. */
function Course({ evals }) {
  const asked = (one) => one.asked ?? one.name;
  const measured = evals.filter(({ accuracy }) => accuracy);
  const series = [...new Set(measured.map(asked))].map((key) => {
    const steps = [...new Map(measured.filter((one) => asked(one) === key).map((one) => [one.step, one])).values()];
    return { name: steps[0].name, x: steps.map(({ step }) => step), y: steps.map((one) => one.accuracy.value) };
  }).filter(({ x }) => x.length > 2);
  if (!series.length) return null;
  return html`<div class="charts"><${Chart} name="accuracy" unit="step" series=${series} sync="evaluations" /></div>`;
}

const ALARMS = ["warning", "stall", "faults", "ended"];

export function Events({ name, run }) {
  if (!run.events?.length) return html`<p class="dim empty">nothing happened that is worth a line</p>`;
  return html`<table class="plain events"><thead><tr><th>when</th><th>step</th><th>event</th><th>what</th></tr></thead>
    <tbody>${[...run.events].reverse().map(({ time, event, step, ...rest }) => html`
      <tr class=${ALARMS.includes(event) ? "alarm" : ""}>
        <td data-label="when" class="dim">${time ? new Date(time * 1000).toLocaleString() : "–"}</td>
        <td data-label="step">
          ${step ? html`<a href=${link(["run", name, "attempts"], { step })}>${number(step)}</a>` : DASH}</td>
        <td data-label="event">${event === "warning" ? "▲ warning" : visible(event)}</td>
        <td data-label="what">${visible(said(rest))}</td></tr>`)}</tbody></table>`;
}

function said(event) {
  if (event.evidence) return `${event.evidence}; ${event.action}`;
  const written = (value) => (typeof value === "object" ? JSON.stringify(value) : value);
  return Object.entries(event).map(([key, value]) => `${key}: ${written(value)}`).join(" · ");
}

export function Settings({ name, run }) {
  const { query } = place();
  const from = run.about || query.from === "all" ? "all" : "defaults";
  const differs = useAnswer(from === "all" ? "" : ofRun(name, "differs"));
  const words = (query.q || "").toLowerCase();
  const everything = run.about || { run: run.identity, settings: run.settings };
  const whole = [...leaves(everything)].map(([setting, b]) => ({ setting, b }));
  const listed = from === "all" ? whole : differs.value || [];
  const rows = listed.filter(({ setting, a, b }) => `${setting} ${told(a)} ${told(b)}`.toLowerCase().includes(words));
  return html`<div class="bar filters">
      ${!run.about && html`<label>show <select value=${from} onChange=${(e) => amend({ from: e.target.value })}>
        <option value="defaults">what differs from the defaults</option>
        <option value="all">all, and the machine</option></select></label>`}
      <input type="search" id="search" aria-label="Settings that have" placeholder="name or value …  /"
        value=${query.q || ""} onInput=${(e) => amend({ q: e.target.value }, { keep: false })} /></div>
    <${Problem} error=${differs.error} />
    <table class="plain settings"><thead><tr><th>setting</th><th>here</th>
      ${from !== "all" && html`<th>default</th>`}</tr></thead>
    <tbody>${rows.map(({ setting, a, b }) => html`<tr key=${setting}><th scope="row">${visible(setting)}</th>
      <td data-label="here">${visible(told(b))}</td>
      ${from !== "all" && html`<td data-label="default" class="dim">${visible(told(a))}</td>`}
    </tr>`)}</tbody></table>
    ${listed.length > 0 && !rows.length && html`<p class="dim empty">no setting shown here has that</p>`}
    ${differs.value && !listed.length && html`<p class="dim empty">nothing differs</p>`}`;
}

const told = (value) => (value === null || value === undefined ? "not set" : JSON.stringify(value));

function* leaves(value, before = "") {
  if (!value || typeof value !== "object" || !Object.keys(value).length) {
    if (value !== undefined) yield [before, value];
    return;
  }
  for (const [key, inner] of Object.entries(value)) {
    const name = inner?.name && Array.isArray(value) ? inner.name : key;
    yield* leaves(inner, before ? `${before}.${name}` : name);
  }
}

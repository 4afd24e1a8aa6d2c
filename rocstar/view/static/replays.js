// What steps would have taught under other settings, as `rocstar replay` kept it, and which tokens carry the gradient.

import { Attempt } from "./attempt.js";
import { html, link, number, ofRun, percent, place, Problem, signed, Term, useAnswer, visible } from "./lib.js";
import { Tabs } from "./run.js";

export function Replays({ name }) {
  const { query } = place();
  const { value, error } = useAnswer(ofRun(name, "replays"), { step: query.step }, { every: 5 });
  return html`<${Tabs} name=${name} tab="replays" /><${Problem} error=${error} />
    ${value?.all && html`<${Whole} all=${value.all} />`}
    ${value && (value.steps.length ? html`<${Step} name=${name} query=${query} value=${value} />`
      : html`<p class="dim empty">no step was learnt from again under other settings; ${" "}
        <code>rocstar replay ${visible(name)} --step N learning.loss=gspo,cispo</code> does it</p>`)}`;
}

/** How many steps came out as the run recorded them, and what did not. */
function Whole({ all: { made, steps, versions } }) {
  const other = steps.filter(({ differs }) => Object.keys(differs).length);
  const told = ([what, how]) => `${what} (${how})`;
  return html`<section class="card"><span class=${other.length ? "warn" : "good"}>
      ${other.length ? "▲" : "✓"} ${number(steps.length - other.length)} of ${number(steps.length)} RL steps replayed to
      the bit</span> <span class="dim">on ${visible(made.slice(0, 10))} with rocstar ${visible(versions.rocstar)}</span>
    ${other.map(({ step, differs }) => html`<p>step ${number(step)} differs:
      ${" "}${visible(Object.entries(differs).map(told).join("; "))}</p>`)}</section>`;
}

function Step({ name, query, value: { steps, step, tried } }) {
  const chosen = tried.find(({ settings }) => settings === query.tried) ?? tried[0];
  const at = (changes) => link(["run", name, "replays"], { step, tried: query.tried, row: query.row, ...changes });
  const longest = Math.max(...tried.map((one) => one.gradient_norm));
  return html`<div class="bar"><h1>step ${number(step)}</h1>${steps.length > 1 && html`<nav class="strip"
      aria-label="Steps">${steps.map((one) => html`<a href=${link(["run", name, "replays"], { step: one })}
        aria-current=${one === step ? "page" : undefined}>${number(one)}</a>`)}</nav>`}</div>
    ${chosen ? html`<div class="wide"><table class="plain tried"><thead><tr><th>settings</th>
        ${["gradient_norm", "cosine", "fork_share", "learn/loss", "learn/clip_share"].map((one) => html`
          <th><${Term} name=${one} /></th>`)}<th>attempts</th><th>tokens</th></tr></thead>
      <tbody>${tried.map((one) => html`<${Tried} key=${one.settings} one=${one} longest=${longest}
        chosen=${one === chosen} href=${at({ tried: one.settings })} />`)}</tbody></table></div>
      <${Heaviest} key=${step} name=${name} step=${step} tried=${chosen} row=${query.row} at=${at} />`
      : html`<p class="dim empty">nothing was tried of this step</p>`}`;
}

function Tried({ one, longest, chosen, href }) {
  const cell = (label, text) => html`<td data-label=${label}>${text}</td>`;
  return html`<tr><td data-label="settings">
      <a class="open" href=${href} aria-current=${chosen ? "true" : undefined}>${visible(one.settings)}</a></td>
    <td data-label="gradient norm"><${Bar} share=${one.gradient_norm / longest} />${number(one.gradient_norm)}</td>
    <td data-label="cosine"><${Bar} share=${one.cosine} />${one.cosine?.toFixed(3) ?? "–"}</td>
    <td data-label="on uncertain tokens"><${Bar} share=${one.fork_share} />${percent(one.fork_share)}</td>
    ${cell("loss", number(one.loss))}${cell("clipped", percent(one.clip_share, 2))}
    ${cell("attempts", number(one.attempts))}${cell("tokens", number(one.tokens))}</tr>`;
}

/** A share from −1 to 1; below 0 in another colour. */
const Bar = ({ share }) => html`<span class="stack"><i class=${share < 0 ? "below" : "above"}
  style=${{ width: 100 * Math.abs(share || 0) + "%" }}></i></span> `;

/** The attempts that carry most of the gradient, and the text of one of them. */
function Heaviest({ name, step, tried, row, at }) {
  const found = tried.heaviest;
  const one = found.find((other) => String(other.row) === row) ?? found[0];
  const asked = { part: "rollouts", step, row: one?.row, tried: tried.settings };
  const { value, error } = useAnswer(one ? ofRun(name, "attempt") : "", asked);
  if (!one) return html`<p class="dim empty">these settings gave no token a gradient</p>`;
  const sum = found.reduce((total, { share }) => total + share, 0);
  const own = { at: `rollouts:${step}:${one.row}`, colour: "gradient", tried: tried.settings };
  return html`<h2>Attempts that carry the gradient: ${visible(tried.settings)}</h2>
    <nav class="strip" aria-label="Attempts that carry most">${found.map((other) => html`
      <a class=${other.advantage > 0 ? "right" : "wrong"} href=${at({ row: other.row })}
        aria-current=${other === one ? "page" : undefined}
        title=${`problem ${other.problem_id.slice(0, 8)}, attempt ${other.index}: advantage ${signed(other.advantage)}`}
        >${percent(other.share)}</a>`)}
      <span class="dim">${percent(sum)} of the gradient together</span></nav>
    <p>attempt ${number(one.index)} at problem ${visible(one.problem_id.slice(0, 8))}, ${percent(one.share)} of the
      gradient <a class="button" href=${link(["run", name, "attempt"], own)}>open the attempt</a></p>
    <${Problem} error=${error} />${value && html`<${Attempt} value=${value} colour="gradient" />`}`;
}

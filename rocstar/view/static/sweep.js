// A sweep: for each setting what its finished runs came to, over their seeds.

import { Figure, html, link, number, percent, Problem, Term, useAnswer, visible } from "./lib.js";

const NAMES = { tokens: "mean_response_tokens" }; // figures by other names than evaluations give them

export function Sweep({ name }) {
  const { value, error } = useAnswer(`sweep/${encodeURIComponent(name)}`, {}, { every: 5 });
  if (!value) return html`<${Problem} error=${error} />`;
  return html`<div class="bar"><h1>Sweep ${visible(name)}</h1>
      <span class="dim">means over finished runs, which differ in their seeds; gain: after less before</span></div>
    <div class="wide"><table class="plain sweep"><thead><tr><th>setting</th><th>runs</th><th>evaluation</th>
      <th>figure</th><th>mean, with 95% interval</th><th>range</th></tr></thead>
    ${value.settings.map((row) => html`<tbody>${(row.figures.length ? row.figures : [null]).map((figure, at) => html`
      <tr>${at === 0 && html`<${Setting} row=${row} />`}
        ${figure ? html`<${Cells} figure=${figure} />` : html`<td colspan="4" class="dim">none is finished yet</td>`}
      </tr>`)}</tbody>`)}</table></div>`;
}

function Setting({ row: { settings, runs, finished, figures } }) {
  const tall = figures.length || 1;
  const all = Object.entries(settings);
  return html`<td rowspan=${tall}>${!all.length && "all runs"}${all.map(([key, value]) => html`
      <div><code>${visible(key)}</code> = ${visible(JSON.stringify(value))}</div>`)}</td>
    <td data-label="runs" rowspan=${tall}>${finished} of ${runs.length} finished
      ${runs.map((run) => html`<div><a href=${link(["run", run.name])}>seed ${run.seed}</a></div>`)}</td>`;
}

function Cells({ figure: { evaluation, figure, mean, interval, range } }) {
  const count = figure === "tokens", gain = evaluation === "gain";
  const form = count ? number : (value) => (gain && value > 0 ? "+" : "") + percent(value);
  const between = ([low, high]) => `${form(low)} to ${form(high)}`;
  const plain = html`<b>${form(mean)}</b> ${interval && html`<span class="dim">${between(interval)}</span>`}`;
  return html`<td data-label="evaluation">${visible(evaluation)}</td>
    <td data-label="figure"><${Term} name=${NAMES[figure] ?? figure} /></td>
    <td data-label="mean">${count || gain ? plain : html`<${Figure} figure=${{ value: mean, interval }} />`}</td>
    <td data-label="range">${between(range)}</td>`;
}

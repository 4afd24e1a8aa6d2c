// The list of runs, and of evaluations that belong to none.

import { Spark } from "./chart.js";
import { ago, Figure, html, link, number, Problem, State, useAnswer, useState, visible } from "./lib.js";

export function Runs() {
  const { value, error } = useAnswer("sources", {}, { every: 2 });
  const [chosen, choose] = useState([]);
  const [words, setWords] = useState("");
  if (!value) return html`<${Problem} error=${error} />`;
  const fits = ({ name }) => name.toLowerCase().includes(words.toLowerCase());
  const runs = value.sources.filter(({ kind }) => kind === "run").filter(fits);
  const others = value.sources.filter(({ kind }) => kind !== "run").filter(fits);
  const toggle = (name) => choose(chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name]);
  return html`<div class="bar"><h1>Runs</h1><span class="dim path">${value.base}</span>
      <input type="search" id="search" placeholder="name …  /" aria-label="Runs whose name has" value=${words} onInput=${(e) => setWords(e.target.value)} />
      <a class="button ${chosen.length < 2 ? "off" : ""}" href=${chosen.length < 2 ? undefined : link(["run", chosen[0]], { with: chosen.slice(1).join(",") })}>compare ${chosen.length || ""}</a></div>
    <${Problem} error=${error} />
    ${!runs.length && !others.length && html`<p class="dim empty">there are no runs here yet; this page shows them as soon as they begin</p>`}
    ${runs.length > 0 && html`<div class="wide"><table class="runs"><thead><tr><th><span class="sr">choose</span></th><th>run</th><th>state</th><th>steps</th><th>curve</th><th>last</th><th>evaluations</th><th>warnings</th><th>written</th></tr></thead>
      <tbody>${runs.map((run) => html`<${Run} key=${run.name} run=${run} chosen=${chosen.includes(run.name)} toggle=${toggle} />`)}</tbody></table></div>`}
    ${others.length > 0 && html`<h2>Evaluations of models</h2><table class="runs"><tbody>${others.map((one) => html`<tr key=${one.name}>
      <td data-label="evaluation"><a class="open" href=${link(["eval", one.name, one.evals[0]?.name ?? "", one.evals[0]?.step ?? 0])}>${visible(one.name)}</a></td>
      <td data-label="accuracy">${one.broken ? html`<${Problem} error=${one.broken} />` : html`<${Figure} figure=${one.evals[0]?.accuracy} />`}</td></tr>`)}</tbody></table>`}`;
}

function Run({ run, chosen, toggle }) {
  const step = run.last.step ?? 0;
  const before = run.evals.find(({ name }) => name === "before"); // what else is of the same problems is the run's own
  const last = run.evals.filter((one) => !before || one.asked === before.asked).sort((a, b) => a.step - b.step).at(-1);
  return html`<tr><td><input type="checkbox" aria-label=${"choose " + run.name} checked=${chosen} onChange=${() => toggle(run.name)} /></td>
    <td data-label="run"><a class="open" href=${link(["run", run.name])}>${visible(run.name)}</a>${run.broken && html`<${Problem} error=${run.broken} />`}</td>
    <td data-label="state"><${State} state=${run.state} /></td>
    <td data-label="steps"><progress max=${run.steps || 1} value=${step} aria-label="steps done"></progress> ${number(step)}<span class="dim"> / ${number(run.steps)}</span></td>
    <td data-label=${run.spark.metric ?? "curve"}><${Spark} values=${run.spark.values} label=${run.spark.metric} /></td>
    <td data-label=${run.spark.metric ?? "last"}>${number(run.spark.values.at(-1))} <span class="dim">${run.spark.metric}</span></td>
    <td data-label="evaluation">${last ? html`<a href=${link(["eval", run.name, last.name, last.step])}>${last.name}</a> <${Figure} figure=${last.accuracy} />` : html`<span class="dim">–</span>`}</td>
    <td data-label="warnings">${run.warnings ? html`<a class="warn" href=${link(["run", run.name, "events"])}>▲ ${run.warnings}</a>` : html`<span class="dim">0</span>`}</td>
    <td data-label="written" class="dim">${ago(run.active)}</td></tr>`;
}

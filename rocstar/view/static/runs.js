// The list of runs, and of evaluations that belong to none.

import { Spark } from "./chart.js";
import { ago, amend, Figure, html, link, number, place, Problem, State, useAnswer, useState, visible } from "./lib.js";

const MOST_COMPARED = 6;
const DASH = html`<span class="dim">–</span>`;

/** `value` is what a column sorts by. */
const COLUMNS = [
  { id: "run", value: (run) => run.name, cell: Name },
  { id: "state", value: (run) => run.state, cell: ({ run }) => html`<${State} state=${run.state} />` },
  { id: "steps", value: (run) => run.last.step ?? 0, cell: Steps },
  { id: "curve", value: (run) => run.spark.values.at(-1), cell: Curve },
  { id: "before", value: (run) => before(run)?.accuracy?.value, cell: ({ run }) => result(run, before(run)) },
  { id: "after", value: (run) => after(run)?.accuracy?.value, cell: ({ run }) => result(run, after(run)) },
  { id: "warnings", value: (run) => run.warnings, cell: Warnings },
  { id: "written", value: (run) => run.active, cell: ({ run }) => html`<span class="dim">${ago(run.active)}</span>` },
];

const before = (run) => run.evals.find(({ name }) => name === "before");

/** The last evaluation after it, of the same problems where they are known. */
function after(run) {
  const first = before(run);
  const later = run.evals.filter((one) => one !== first && (!first || one.asked === first.asked));
  return later.sort((a, b) => a.step - b.step).at(-1);
}

export function Runs() {
  const { query } = place();
  const { value, error } = useAnswer("sources", {}, { every: 2 });
  const [chosen, choose] = useState([]);
  const [words, setWords] = useState("");
  if (!value) return html`<${Problem} error=${error} />`;
  const fits = ({ name, sweep }) => `${name} ${sweep || ""}`.toLowerCase().includes(words.toLowerCase());
  const runs = value.sources.filter(({ kind }) => kind === "run").filter(fits);
  const others = value.sources.filter(({ kind }) => kind === "evaluation").filter(fits);
  const files = value.sources.filter(({ kind }) => kind === "rollouts").filter(fits);
  const compared = chosen.slice(0, MOST_COMPARED);
  const address = compared.length < 2 ? undefined : link(["run", compared[0]], { with: compared.slice(1).join(",") });
  const told = chosen.length > MOST_COMPARED ? `the first ${MOST_COMPARED} of ${chosen.length}` : chosen.length || "";
  return html`<div class="bar"><h1>Runs</h1><span class="dim path">${value.base}</span>
      <input type="search" id="search" placeholder="name …  /" aria-label="Runs whose name has" value=${words}
        onInput=${(e) => setWords(e.target.value)} />
      <a class="button ${address ? "" : "off"}" href=${address}>compare ${told}</a>
      <${Order} sort=${query.sort} /></div>
    <${Problem} error=${error} />
    ${!runs.length && !others.length && !files.length && html`<p class="dim empty">
      there are no runs here yet; this page shows them as soon as they begin</p>`}
    ${runs.length > 0 && html`<div class="wide"><table class="runs"><thead><tr><th><span class="sr">choose</span></th>
      ${COLUMNS.map((column) => html`<${Head} column=${column} sort=${query.sort} />`)}</tr></thead>
      ${grouped(runs, query.sort).map(([sweep, some]) => html`<${Group} key=${sweep} sweep=${sweep}
        runs=${some} chosen=${chosen} choose=${choose} />`)}</table></div>`}
    ${files.length > 0 && html`<h2>Rollouts of others</h2><table class="runs"><tbody>${files.map((one) => html`
      <tr key=${one.name}><td data-label="rollouts">
        <a class="open" href=${link(["run", one.name, "attempts"])}>${visible(one.name)}</a></td>
      <td data-label="attempts">${number(one.about.attempts)} attempts, ${visible(one.about["written by"])}
        ${one.refused[0] && html`<span class="warn"> ${visible(one.refused[0])}</span>`}</td></tr>`)}</tbody></table>`}
    ${others.length > 0 && html`<h2>Evaluations of models</h2><table class="runs"><tbody>${others.map((one) => html`
      <tr key=${one.name}><td data-label="evaluation">
        <a class="open" href=${link(["eval", one.name, one.evals[0]?.name ?? "", one.evals[0]?.step ?? 0])}>
          ${visible(one.name)}</a></td>
      <td data-label="accuracy">${one.broken ? html`<${Problem} error=${one.broken} />`
        : html`<${Figure} figure=${one.evals[0]?.accuracy} />`}</td></tr>`)}</tbody></table>`}`;
}

/** For a narrow screen, which has no heads. */
function Order({ sort }) {
  return html`<label class="narrow">order <select value=${sort || ""}
      onChange=${(e) => amend({ sort: e.target.value })}>
      <option value="">by name</option>${COLUMNS.flatMap(({ id }) => [
        html`<option value=${id}>${id} ↑</option>`,
        html`<option value=${"-" + id}>${id} ↓</option>`,
      ])}</select></label>`;
}

function Head({ column: { id }, sort }) {
  const way = sort === id ? "ascending" : sort === "-" + id ? "descending" : undefined;
  const text = `${id}${way ? (way === "ascending" ? " ↑" : " ↓") : ""}`;
  const next = way === "descending" ? id : way === "ascending" ? "" : "-" + id;
  return html`<th aria-sort=${way}><button onClick=${() => amend({ sort: next })}>${text}</button></th>`;
}

/** [sweep, its runs], runs of none first; all as one list where they are sorted. */
function grouped(runs, sort) {
  const column = COLUMNS.find(({ id }) => id === sort?.replace(/^-/, ""));
  if (column) return [["", sorted(runs, column.value, sort.startsWith("-"))]];
  const sweeps = [...new Set(runs.map(({ sweep }) => sweep).filter(Boolean))].sort();
  const groups = ["", ...sweeps].map((name) => [name, runs.filter(({ sweep }) => (sweep || "") === name)]);
  return groups.filter(([, some]) => some.length);
}

function sorted(runs, value, down) {
  const absent = (one) => one === null || one === undefined;
  const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  return [...runs].sort((one, other) => {
    const [a, b] = [value(one), value(other)];
    if (absent(a) || absent(b)) return absent(a) - absent(b);
    return down ? order(b, a) : order(a, b);
  });
}

function Group({ sweep, runs, chosen, choose }) {
  const names = runs.map(({ name }) => name);
  const all = names.every((name) => chosen.includes(name));
  const without = chosen.filter((name) => !names.includes(name));
  const toggle = (name) => choose(chosen.includes(name) ? chosen.filter((one) => one !== name) : [...chosen, name]);
  const finished = runs.filter(({ state }) => state === "finished").length;
  return html`<tbody>
    ${sweep && html`<tr class="sweep"><td><input type="checkbox" aria-label=${`choose the runs of sweep ${sweep}`}
        checked=${all} onChange=${() => choose(all ? without : [...without, ...names])} /></td>
      <td colspan=${COLUMNS.length}>sweep ${visible(sweep)}
        <span class="dim"> · ${runs.length} runs, ${finished} finished</span></td></tr>`}
    ${runs.map((run) => html`<tr key=${run.name} class=${sweep ? "member" : ""}>
      <td><input type="checkbox" aria-label=${"choose " + run.name} checked=${chosen.includes(run.name)}
        onChange=${() => toggle(run.name)} /></td>
      ${COLUMNS.map(({ id, cell }) => html`<td data-label=${id}>
        <${cell} run=${run} sweep=${sweep} /></td>`)}</tr>`)}
  </tbody>`;
}

/** In its sweep a run is named by what differs. */
function Name({ run, sweep }) {
  const name = sweep && run.name.startsWith(sweep + "-") ? run.name.slice(sweep.length + 1) : run.name;
  return html`<a class="open" href=${link(["run", run.name])}>${visible(name)}</a>
    ${run.broken && html`<${Problem} error=${run.broken} />`}`;
}

function Steps({ run }) {
  const step = run.last.step ?? 0, over = run.state === "finished";
  return html`<progress max=${over ? 1 : run.steps || 1} value=${over ? 1 : step} aria-label="steps done"></progress>
    ${" "}${number(step)}${!over && html`<span class="dim"> / ${number(run.steps)}</span>`}`;
}

function Curve({ run: { spark } }) {
  return html`<span class="curve"><${Spark} values=${spark.values} label=${spark.metric} />
    <span>${number(spark.values.at(-1))} <span class="dim">${spark.metric?.split("/")[0]}</span></span></span>`;
}

function result(run, one) {
  if (!one) return DASH;
  const named = ["before", "after"].includes(one.name) ? "" : html`<span class="dim">${visible(one.name)}</span>`;
  return html`<a class="result" href=${link(["eval", run.name, one.name, one.step])}>
    <${Figure} figure=${one.accuracy} short=${true} /></a>${named}`;
}

function Warnings({ run }) {
  if (!run.warnings) return html`<span class="dim">0</span>`;
  return html`<a class="warn" href=${link(["run", run.name, "events"])}>▲ ${run.warnings}</a>`;
}

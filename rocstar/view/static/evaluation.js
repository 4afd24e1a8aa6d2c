// An evaluation: its figures, its problems with the wrong ones first, and the same problems under another subject.

import { groupAt, Tally } from "./attempts.js";
import {
  amend, Figure, html, link, number, ofRun, percent, place, Problem, Term, useAnswer, useState, visible,
} from "./lib.js";
import { List } from "./list.js";
import { Tabs } from "./run.js";

const FIRST = ["accuracy", "greedy"];
const PLAIN = [
  "mean_response_tokens", "calls_per_attempt", "failed_call_share", "no_tool_share", "truncation_share",
  "tool_error_share_in_correct", "undecided", "environment_failed", "attempts", "problems",
];
const COLUMNS = [
  { name: "share", label: "right", sort: "share", cell: (row) => html`<${Tally} row=${row} />` },
  { name: "tokens", label: "tokens", sort: "tokens", cell: (row) => number(row.tokens) },
  { name: "calls", label: "failed", sort: "failed_calls", cell: failed },
  { name: "kept", label: "answer", cell: (row) => visible(row.gold) },
  { name: "text", label: "problem", cell: (row) => visible(row.question) },
];

function failed(row) {
  return html`${number(row.failed_calls)}<span class="dim">/${number(row.calls)}</span>`;
}

export function Evaluation({ name, part, step }) {
  const { query } = place();
  const asked = { eval: part, step, against: query.against };
  const { value, error } = useAnswer(ofRun(name, "evaluation"), asked);
  const known = useAnswer("sources");
  const others = (known.value?.sources || [])
    .flatMap((source) => source.evals.map((one) => `${source.name}/${one.name}/${one.step}`))
    .filter((one) => one !== `${name}/${part}/${step}`);
  const problems = value?.result.setup?.data && `, ${number(value.result.setup.data.problems)} problems`;
  return html`<${Tabs} name=${name} tab="evaluations" />
    <div class="bar"><h1>${visible(part)}</h1><span class="dim">step ${number(+step)}${problems}</span>
      <label>against <select value=${query.against || ""} onChange=${(e) => amend({ against: e.target.value })}>
        <option value="">nothing</option>${others.map((one) => html`<option value=${one}>${visible(one)}</option>`)}
      </select></label></div><${Problem} error=${error} />
    ${value && html`<${Figures} result=${value.result} />`}
    ${query.against ? value?.paired && html`<${Paired} name=${name} part=${part} step=${step} against=${query.against}
        found=${value.paired} />`
      : html`<${List} path=${ofRun(name, "groups")} query=${{ part, step, q: query.q }} columns=${COLUMNS}
        label="Problems" sort=${query.sort || "share"} onSort=${(sort) => amend({ sort })}
        href=${(row) => groupAt(name, row)} />`}`;
}

/** The figures that matter first; with one attempt at each problem avg@1, pass@1 and maj@1 are the accuracy again. */
function Figures({ result }) {
  const [all, show] = useState(innerWidth > 700);
  const isFigure = ([key, one]) => typeof one?.value === "number" && !key.endsWith("@1");
  const figures = Object.entries(result).filter(isFigure).sort(([a], [b]) => FIRST.includes(b) - FIRST.includes(a));
  const parts = Object.keys(result).filter((key) => key.startsWith("reward/parts/"));
  const plain = [...PLAIN, ...parts].filter((key) => typeof result[key] === "number");
  const shown = all ? figures : figures.slice(0, FIRST.length);
  return html`<section class="card figures">
    ${shown.map(([key, figure]) => html`<div><span class="dim"><${Term} name=${key} label=${figureLabel(key)} /></span>
      <${Figure} figure=${figure} /></div>`)}
    ${all && plain.map((key) => html`<div><span class="dim"><${Term} name=${key} label=${figureLabel(key)} /></span>
      <b>${key.endsWith("_share") || key.endsWith("_correct") ? percent(result[key]) : number(result[key])}</b></div>`)}
    ${!all && html`<button onClick=${() => show(true)}>all ${figures.length + plain.length} figures</button>`}
  </section>`;
}

const figureLabel = (key) => (/[@\d/]/.test(key) ? key : undefined); // k and parts stand in the name

const KINDS = {
  fixed: (row) => row.difference > 0,
  broken: (row) => row.difference < 0,
  "both right": (row) => row.difference === 0 && row.a === 1,
  "both wrong": (row) => row.difference === 0 && row.a === 0,
  "same, mixed": (row) => row.difference === 0 && row.a > 0 && row.a < 1,
};
const MOST_PAIRS = 500;

function Paired({ name, part, step, against, found }) {
  const [kind, show] = useState("");
  const chosen = found.table.filter(KINDS[kind] || (() => true));
  const rows = chosen.sort((x, y) => Math.abs(y.difference) - Math.abs(x.difference));
  const { value, interval } = found.difference;
  const alone = found.only_a + found.only_b;
  const chip = ([label, test]) => html`<button class="chip" aria-pressed=${kind === label}
    onClick=${() => show(kind === label ? "" : label)}>${label} ${number(found.table.filter(test).length)}</button>`;
  return html`<section class="card funnel"><b>${value > 0 ? "+" : ""}${(100 * value).toFixed(1)} points</b>
      <span>95% interval ${(100 * interval[0]).toFixed(1)} to ${(100 * interval[1]).toFixed(1)}</span>
      ${found.p_value !== undefined && html`<span>p = ${number(found.p_value)}</span>`}
      <span class="dim">${number(found.problems)} problems of both${alone ? `, ${alone} of one only` : ""}</span>
      ${found.differs && html`<span class="warn">▲ not asked alike: ${visible(found.differs)}</span>`}</section>
    <div class="bar presets">${Object.entries(KINDS).map(chip)}</div>
    <div class="wide"><table class="plain"><thead><tr><th>change</th><th>${visible(against)}</th><th>here</th>
      <th>right answer</th><th>problem</th></tr></thead><tbody>${rows.slice(0, MOST_PAIRS).map((row) => html`
      <${Pair} key=${row.problem_id} row=${row} here=${{ name, part, step }} against=${against} />`)}
    </tbody></table></div>
    ${rows.length > MOST_PAIRS && html`<p class="dim">the first ${MOST_PAIRS} of ${number(rows.length)}</p>`}`;
}

function Pair({ row, here: { name, part, step }, against }) {
  const [its, ...rest] = against.split("/");
  const there = groupAt(its, { part: rest.slice(0, -1).join("/"), step: rest.at(-1), grp: row.groups[0] });
  const change = 100 * row.difference;
  return html`<tr><td data-label="change" class=${change > 0 ? "good" : change < 0 ? "warn" : "dim"}>
      ${change > 0 ? "+" : ""}${change.toFixed(0)}</td>
    <td data-label=${visible(against)}><a href=${there}>${percent(row.a, 0)}</a></td>
    <td data-label="here">
      <a class="open" href=${groupAt(name, { part, step, grp: row.groups[1] })}>${percent(row.b, 0)}</a></td>
    <td data-label="right answer">${visible(row.gold)}</td>
    <td data-label="problem" class="cut">${visible(row.question)}</td></tr>`;
}

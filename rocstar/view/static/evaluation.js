// An evaluation: its figures, its problems with the wrong ones first, and the same problems under another subject.

import { Tally, groupAt } from "./attempts.js";
import { List } from "./list.js";
import { amend, Figure, html, link, number, ofRun, percent, place, Problem, useAnswer, useState, visible } from "./lib.js";
import { Tabs } from "./run.js";

const PLAIN = { mean_response_tokens: "tokens an attempt", calls_per_attempt: "calls an attempt", failed_call_share: "failed calls", no_tool_share: "without the tool", truncation_share: "cut", tool_error_share_in_correct: "right with a failed call", undecided: "undecided", environment_failed: "our faults", attempts: "attempts", problems: "problems" };
const SHARES = ["failed_call_share", "no_tool_share", "truncation_share", "tool_error_share_in_correct"];
const COLUMNS = [
  { name: "share", label: "right", sort: "share", cell: (row) => html`<${Tally} row=${row} />` },
  { name: "tokens", label: "tokens", sort: "tokens", cell: (row) => number(row.tokens) },
  { name: "calls", label: "failed", sort: "failed_calls", cell: (row) => html`${number(row.failed_calls)}<span class="dim">/${number(row.calls)}</span>` },
  { name: "kept", label: "right answer", cell: (row) => visible(row.gold) },
  { name: "text", label: "problem", cell: (row) => visible(row.question) },
];

export function Evaluation({ name, part, step }) {
  const { query } = place();
  const { value, error } = useAnswer(ofRun(name, "evaluation"), { eval: part, step, against: query.against });
  const known = useAnswer("sources");
  const others = (known.value?.sources || []).flatMap((source) => source.evals.map((one) => `${source.name}/${one.name}/${one.step}`)).filter((one) => one !== `${name}/${part}/${step}`);
  const figures = Object.entries(value?.result || {}).filter(([key, one]) => one && typeof one === "object" && typeof one.value === "number");
  return html`<${Tabs} name=${name} tab="evaluations" /><div class="bar"><h1>${visible(part)}</h1><span class="dim">step ${number(+step)}${value?.result.setup?.data ? `, ${number(value.result.setup.data.problems)} problems` : ""}</span>
      <label>against <select value=${query.against || ""} onChange=${(e) => amend({ against: e.target.value })}><option value="">nothing</option>${others.map((one) => html`<option value=${one}>${visible(one)}</option>`)}</select></label></div><${Problem} error=${error} />
    ${value && html`<section class="card figures">${figures.map(([key, figure]) => html`<div><span class="dim">${visible(key)}</span><${Figure} figure=${figure} /></div>`)}
      ${Object.entries(PLAIN).filter(([key]) => typeof value.result[key] === "number").map(([key, label]) => html`<div><span class="dim">${label}</span><b>${SHARES.includes(key) ? percent(value.result[key]) : number(value.result[key])}</b></div>`)}</section>`}
    ${query.against ? value?.paired && html`<${Paired} name=${name} part=${part} step=${step} against=${query.against} found=${value.paired} />`
      : html`<${List} path=${ofRun(name, "groups")} query=${{ part, step, q: query.q }} columns=${COLUMNS} label="Problems" sort=${query.sort || "share"} onSort=${(sort) => amend({ sort })} href=${(row) => groupAt(name, row)} />`}`;
}

function Paired({ name, part, step, against, found }) {
  const [kind, show] = useState("");
  const kinds = { fixed: (row) => row.difference > 0, broken: (row) => row.difference < 0, "both right": (row) => row.difference === 0 && row.a === 1, "both wrong": (row) => row.difference === 0 && row.a === 0, "same, mixed": (row) => row.difference === 0 && row.a > 0 && row.a < 1 };
  const rows = found.table.filter(kinds[kind] || (() => true)).sort((x, y) => Math.abs(y.difference) - Math.abs(x.difference));
  const [its, itsPart, itsStep] = (([run, ...rest]) => [run, rest.slice(0, -1).join("/"), rest.at(-1)])(against.split("/"));
  const difference = found.difference;
  return html`<section class="card funnel"><b>${difference.value > 0 ? "+" : ""}${(100 * difference.value).toFixed(1)} points</b><span>95% interval ${(100 * difference.interval[0]).toFixed(1)} to ${(100 * difference.interval[1]).toFixed(1)}</span>
      ${found.p_value !== undefined && html`<span>p = ${number(found.p_value)}</span>`}<span class="dim">${number(found.problems)} problems of both${found.only_a + found.only_b ? `, ${found.only_a + found.only_b} of one only` : ""}</span>
      ${found.differs && html`<span class="warn">▲ not asked alike: ${visible(found.differs)}</span>`}</section>
    <div class="bar presets">${Object.entries(kinds).map(([label, test]) => html`<button class="chip" aria-pressed=${kind === label} onClick=${() => show(kind === label ? "" : label)}>${label} ${number(found.table.filter(test).length)}</button>`)}</div>
    <div class="wide"><table class="plain"><thead><tr><th>change</th><th>${visible(against)}</th><th>here</th><th>right answer</th><th>problem</th></tr></thead><tbody>${rows.slice(0, 500).map((row) => html`<tr key=${row.problem_id}>
      <td data-label="change" class=${row.difference > 0 ? "good" : row.difference < 0 ? "warn" : "dim"}>${row.difference > 0 ? "+" : ""}${(100 * row.difference).toFixed(0)}</td>
      <td data-label=${visible(against)}><a href=${groupAt(its, { part: itsPart, step: itsStep, grp: row.groups[0] })}>${percent(row.a, 0)}</a></td><td data-label="here"><a class="open" href=${groupAt(name, { part, step, grp: row.groups[1] })}>${percent(row.b, 0)}</a></td>
      <td data-label="right answer">${visible(row.gold)}</td><td data-label="problem" class="cut">${visible(row.question)}</td></tr>`)}</tbody></table></div>${rows.length > 500 && html`<p class="dim">the first 500 of ${number(rows.length)}</p>`}`;
}

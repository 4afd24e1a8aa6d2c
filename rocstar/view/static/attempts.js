// The lists of attempts and of groups of a run, with filters that all stand in the address.

import { List } from "./list.js";
import { amend, html, link, number, ofRun, percent, place, Problem, seconds, signed, useAnswer, useState, usePaused, Verdict, visible } from "./lib.js";
import { Tabs } from "./run.js";

const PRESETS = [
  ["errors in right", { verdict: "right", failed: "1.." }], ["right without tool", { verdict: "right", calls: "..0" }], ["wrong, no error", { verdict: "wrong", failed: "..0" }],
  ["cut", { stop: "max_tokens" }], ["no answer", { method: "no_answer" }], ["right but dropped", { verdict: "right", kept: "no" }], ["our fault", { fault: "yes" }], ["4 or more calls", { calls: "4.." }],
];
const FIELDS = ["verdict", "reason", "stop", "error", "tool", "method"];
const RANGES = [["step", "step"], ["tokens", "tokens"], ["calls", "calls"], ["failed", "failed calls"], ["penalty", "penalty"], ["entropy", "entropy"]];
export const FILTERS = [...FIELDS, ...RANGES.map(([name]) => name), "part", "stage", "problem", "kept", "fault", "q", "turns", "reward", "seconds", "version"];

export const filters = (query) => Object.fromEntries(Object.entries(query).filter(([name]) => FILTERS.includes(name)));

const attemptAt = (name, row, query) => link(["run", name, "attempt"], { ...filters(query), sort: query.sort, part: row.part, step: undefined, at: `${row.part}:${row.step}:${row.row}` });
export const groupAt = (name, row) => link(["run", name, "group"], { at: `${row.part}:${row.step}:${row.grp}` });

const COLUMNS = [
  { name: "step", label: "step", sort: "step", cell: (row) => html`${row.part === "rollouts" ? "" : visible(row.part) + " "}${number(row.step)}<span class="dim">·${row.sibling}</span>` },
  { name: "verdict", label: "verdict", sort: "verdict", cell: (row) => html`<${Verdict} verdict=${row.verdict} />` },
  { name: "kept", label: "fate", sort: "reason", cell: (row) => row.reason ? html`<span class="fate ${row.kept ? "kept" : ""}">${row.reason}</span>` : html`<span class="dim">–</span>` },
  { name: "penalty", label: "penalty", sort: "penalty_total", cell: (row) => number(row.penalty_total) },
  { name: "adv", label: "advantage", sort: "advantage", cell: (row) => signed(row.advantage) },
  { name: "tokens", label: "tokens", sort: "tokens", cell: (row) => number(row.tokens) },
  { name: "calls", label: "calls", sort: "calls", cell: (row) => html`${row.calls}${row.failed_calls > 0 && html` <span class="warn">${row.failed_calls}✗</span>`}` },
  { name: "entropy", label: "entropy", sort: "entropy", cell: (row) => number(row.entropy) },
  { name: "time", label: "time", sort: "seconds", cell: (row) => seconds(row.seconds) },
  { name: "error", label: "errors", cell: (row) => html`<span class="warn">${visible((row.errors || []).join(", "))}</span>` },
  { name: "text", label: "problem and end", cell: (row) => html`<span class="dim">${visible(row.question?.slice(0, 60))} …</span> ${visible(row.preview)}` },
];

const GROUP_COLUMNS = [
  { name: "step", label: "step", sort: "step", cell: (row) => html`${row.part === "rollouts" ? "" : visible(row.part) + " "}${number(row.step)}` },
  { name: "share", label: "right", sort: "share", cell: (row) => html`<${Tally} row=${row} />` },
  { name: "attempts", label: "kept", sort: "kept", cell: (row) => html`${number(row.kept)}<span class="dim">/${number(row.attempts)}</span>` },
  { name: "tokens", label: "tokens", sort: "tokens", cell: (row) => number(row.tokens) },
  { name: "calls", label: "failed", sort: "failed_calls", cell: (row) => html`${number(row.failed_calls)}<span class="dim">/${number(row.calls)}</span>` },
  { name: "kept", label: "mostly", cell: (row) => html`<span class="dim">${row.reason}</span>` },
  { name: "text", label: "problem", cell: (row) => visible(row.question) },
];

export function Tally({ row }) {
  const width = (count) => ({ width: (100 * count) / Math.max(1, row.attempts) + "%" });
  return html`<span class="tally" role="img" aria-label=${`${row.right} right, ${row.wrong} wrong of ${row.attempts}`}><i class="right" style=${width(row.right)}></i><i class="wrong" style=${width(row.wrong)}></i></span> ${row.right}/${row.attempts}`;
}

export function Attempts({ name }) {
  const { query } = place();
  const asked = { ...filters(query), q: usePaused(query.q || "", 250) };
  return html`<h1 class="sr">Attempts of ${name}</h1><${Tabs} name=${name} tab="attempts" /><${Filters} name=${name} what="attempts" />
    <${List} path=${ofRun(name, "attempts")} query=${asked} columns=${COLUMNS} label="Attempts" sort=${query.sort || "-step"} onSort=${(sort) => amend({ sort })} href=${(row) => attemptAt(name, row, query)} onAbout=${tell} />`;
}

export function Groups({ name }) {
  const { query } = place();
  const asked = { part: "rollouts", ...filters(query), q: usePaused(query.q || "", 250) };
  return html`<h1 class="sr">Groups of ${name}</h1><${Tabs} name=${name} tab="groups" /><${Filters} name=${name} what="groups" />
    <${List} path=${ofRun(name, "groups")} query=${asked} columns=${GROUP_COLUMNS} label="Groups" sort=${query.sort || "-step"} onSort=${(sort) => amend({ sort })} href=${(row) => groupAt(name, row)} onAbout=${tell} />`;
}

let heard = () => {};
const tell = (about) => heard(about);

function Filters({ name, what }) {
  const { query } = place();
  const [about, setAbout] = useState(null);
  heard = setAbout;
  const { value, error } = useAnswer(ofRun(name, "facets"), { ...filters(query), q: usePaused(query.q || "", 250) }, { every: 1, again: (found) => found.indexing > 0 || found.of > found.searched });
  const options = (field) => [...new Set([...(query[field] ? [query[field]] : []), ...(value?.facets[field] || []).map(([one]) => one)])];
  const counts = Object.fromEntries(FIELDS.flatMap((field) => (value?.facets[field] || []).map(([one, n]) => [field + one, n])));
  const set = filters(query), unknown = Object.keys(query).filter((one) => ![...FILTERS, "sort"].includes(one));
  const clear = Object.fromEntries(FILTERS.map((field) => [field, ""]));
  const active = ([, preset]) => Object.entries(preset).every(([key, one]) => query[key] === one);
  return html`<div class="bar filters">
      <input type="search" id="search" aria-label="Text, in what was written, replied and asked" placeholder="text in attempts, replies, questions …  /" value=${query.q || ""} onInput=${(e) => amend({ q: e.target.value }, { keep: false })} />
      <b class="count" aria-live="polite">${about ? number(about.total) : "…"} ${what}</b>
      ${about?.indexing > 0 && html`<span class="busy">reading ${about.indexing} more files</span>`}
      ${about && about.searched < about.of && html`<span class="busy">searched ${about.searched} of ${about.of} files</span>`}
      ${Object.keys(set).length > 0 && html`<button onClick=${() => amend(clear)}>clear</button>`}
    </div>
    <details class="filters" open=${innerWidth > 900 || undefined}><summary>filters</summary><div class="bar filters">
      ${value?.stages.length > 1 && html`<label>stage <select value=${query.stage || ""} onChange=${(e) => amend({ stage: e.target.value })}><option value="">all</option>${value.stages.map((one) => html`<option value=${one}>${visible(one)}</option>`)}</select></label>`}
      ${(value?.facets.part?.length > 1 || query.part) && html`<label>of <select value=${query.part || ""} onChange=${(e) => amend({ part: e.target.value })}><option value="">all</option>${options("part").map((one) => html`<option value=${one}>${visible(one)}</option>`)}</select></label>`}
      ${FIELDS.filter((field) => options(field).length > 0).map((field) => html`<label>${field} <select value=${query[field] || ""} onChange=${(e) => amend({ [field]: e.target.value })}><option value="">all</option>${options(field).map((one) => html`<option value=${one}>${visible(one)}${counts[field + one] ? ` (${number(counts[field + one])})` : ""}</option>`)}</select></label>`)}
      <label>kept <select value=${query.kept || ""} onChange=${(e) => amend({ kept: e.target.value })}><option value="">all</option><option value="yes">yes</option><option value="no">no</option></select></label>
      ${RANGES.map(([field, label]) => html`<label>${label} <input class="range" placeholder="5..9" value=${query[field] || ""} onChange=${(e) => amend({ [field]: e.target.value.trim() })} /></label>`)}
      ${query.problem && html`<span class="chip">problem ${visible(query.problem.slice(0, 12))} <button aria-label="all problems" onClick=${() => amend({ problem: "" })}>×</button></span>`}
    </div><div class="bar presets">${PRESETS.map((preset) => html`<button aria-pressed=${active(preset)} class="chip" onClick=${() => amend(active(preset) ? Object.fromEntries(Object.keys(preset[1]).map((key) => [key, ""])) : preset[1])}>${preset[0]}</button>`)}</div></details>
    <${Problem} error=${error} />${unknown.map((one) => html`<${Problem} error=${`the address asks for ${one}, which is no filter of this list`} />`)}${about?.broken?.map((one) => html`<${Problem} error=${`left out, because it cannot be read: ${one}`} />`)}`;
}

// The lists of attempts and of groups of a run, with filters that all stand in the address.

import {
  amend, html, link, number, ofRun, place, Problem, seconds, signed, Term, useAnswer, usePaused, useState,
  Verdict, visible,
} from "./lib.js";
import { List } from "./list.js";
import { ofOthers, Tabs } from "./run.js";

const PRESETS = [
  ["errors in right", { verdict: "right", failed: "1.." }],
  ["right without tool", { verdict: "right", calls: "..0" }],
  ["wrong, no error", { verdict: "wrong", failed: "..0" }],
  ["cut", { stop: "max_tokens" }],
  ["no answer", { method: "no_answer" }],
  ["right but dropped", { verdict: "right", kept: "no" }],
  ["our fault", { fault: "yes" }],
  ["4 or more calls", { calls: "4.." }],
];
const FIELDS = ["verdict", "reason", "stop", "error", "tool", "method"];
const RANGES = {
  step: "step", tokens: "tokens", calls: "calls", failed: "failed calls", penalty: "penalty", entropy: "entropy",
  reward: "reward",
};
export const FILTERS = [
  ...FIELDS, ...Object.keys(RANGES), "part", "stage", "problem", "kept", "fault", "q", "turns", "seconds", "version",
];

export const filters = (query) => Object.fromEntries(Object.entries(query).filter(([name]) => FILTERS.includes(name)));

function attemptAt(name, row, query) {
  const at = `${row.part}:${row.step}:${row.row}`;
  return link(["run", name, "attempt"], { ...filters(query), sort: query.sort, part: row.part, step: undefined, at });
}

export const groupAt = (name, row) => link(["run", name, "group"], { at: `${row.part}:${row.step}:${row.grp}` });

const where = (row) => `${row.part.startsWith("rollouts") ? "" : visible(row.part) + " "}${number(row.step)}`;
const failed = (row) => row.failed_calls > 0 && html` <span class="warn">${row.failed_calls}✗</span>`;
const of = (some, all) => html`${number(some)}<span class="dim">/${number(all)}</span>`;

function fate(row) {
  if (!row.reason) return html`<span class="dim">–</span>`;
  return html`<span class="fate ${row.kept ? "kept" : ""}"><${Term} name=${row.reason} plain /></span>`;
}

const COLUMNS = [
  { name: "step", label: "step", sort: "step", cell: (row) => html`${where(row)}
      <span class="dim">·${row.sibling}</span>` },
  { name: "verdict", label: "verdict", sort: "verdict", cell: (row) => html`<${Verdict} verdict=${row.verdict} />` },
  { name: "kept", label: "fate", sort: "reason", cell: fate },
  { name: "penalty", label: "penalty", sort: "penalty_total", cell: (row) => number(row.penalty_total) },
  { name: "adv", label: "advantage", sort: "advantage", cell: (row) => signed(row.advantage) },
  { name: "tokens", label: "tokens", sort: "tokens", cell: (row) => number(row.tokens) },
  { name: "calls", label: "calls", sort: "calls", cell: (row) => html`${row.calls}${failed(row)}` },
  { name: "entropy", label: "entropy", sort: "entropy", cell: (row) => number(row.entropy) },
  { name: "time", label: "time", sort: "seconds", cell: (row) => seconds(row.seconds) },
  { name: "error", label: "errors", cell: ({ errors }) => html`
      <span class="warn">${visible((errors || []).join(", "))}</span>` },
  { name: "text", label: "problem and end", cell: (row) => html`
      <span class="dim">${visible(row.question?.slice(0, 60))} …</span> ${visible(row.preview)}` },
];

/** Others choose nothing among siblings. */
const REWARD = { name: "kept", label: "reward", sort: "reward", cell: (row) => number(row.reward) };
const COLUMNS_OF_OTHERS = COLUMNS.map((column) => (column.name === "kept" ? REWARD : column));

const GROUP_COLUMNS = [
  { name: "step", label: "step", sort: "step", cell: where },
  { name: "share", label: "right", sort: "share", cell: (row) => html`<${Tally} row=${row} />` },
  { name: "attempts", label: "kept", sort: "kept", cell: (row) => of(row.kept, row.attempts) },
  { name: "tokens", label: "tokens", sort: "tokens", cell: (row) => number(row.tokens) },
  { name: "calls", label: "failed", sort: "failed_calls", cell: (row) => of(row.failed_calls, row.calls) },
  { name: "kept", label: "mostly", cell: (row) => html`<span class="dim">${row.reason}</span>` },
  { name: "text", label: "problem", cell: (row) => visible(row.question) },
];

export function Tally({ row }) {
  const width = (count) => ({ width: (100 * count) / Math.max(1, row.attempts) + "%" });
  const told = `${row.right} right, ${row.wrong} wrong of ${row.attempts}`;
  return html`<span class="tally" role="img" aria-label=${told}><i class="right" style=${width(row.right)}></i>
    <i class="wrong" style=${width(row.wrong)}></i></span> ${row.right}/${row.attempts}`;
}

export function Attempts({ name }) {
  const { query } = place();
  const asked = { ...filters(query), q: usePaused(query.q || "", 250) };
  return html`<h1 class="sr">Attempts of ${name}</h1><${Tabs} name=${name} tab="attempts" />
    <${Filters} name=${name} what="attempts" />
    <${List} path=${ofRun(name, "attempts")} query=${asked} label="Attempts"
      columns=${ofOthers(name) ? COLUMNS_OF_OTHERS : COLUMNS}
      sort=${query.sort || "-step"} onSort=${(sort) => amend({ sort })} onAbout=${tell}
      href=${(row) => attemptAt(name, row, query)} />`;
}

export function Groups({ name }) {
  const { query } = place();
  const asked = { part: "rollouts", ...filters(query), q: usePaused(query.q || "", 250) };
  return html`<h1 class="sr">Groups of ${name}</h1><${Tabs} name=${name} tab="groups" />
    <${Filters} name=${name} what="groups" />
    <${List} path=${ofRun(name, "groups")} query=${asked} columns=${GROUP_COLUMNS} label="Groups"
      sort=${query.sort || "-step"} onSort=${(sort) => amend({ sort })} onAbout=${tell}
      href=${(row) => groupAt(name, row)} />`;
}

let heard = () => {};
const tell = (about) => heard(about);

function Filters({ name, what }) {
  const { query } = place();
  const [about, setAbout] = useState(null);
  heard = setAbout;
  const asked = { ...filters(query), q: usePaused(query.q || "", 250) };
  const again = (found) => found.indexing > 0 || found.of > found.searched;
  const { value, error } = useAnswer(ofRun(name, "facets"), asked, { every: 1, again });
  const unknown = Object.keys(query).filter((one) => ![...FILTERS, "sort"].includes(one));
  const clear = Object.fromEntries(FILTERS.map((field) => [field, ""]));
  return html`<div class="bar filters">
      <input type="search" id="search" aria-label="Text, in what was written, replied and asked"
        placeholder="text in attempts, replies, questions …  /" value=${query.q || ""}
        onInput=${(e) => amend({ q: e.target.value }, { keep: false })} />
      <b class="count" aria-live="polite">${about ? number(about.total) : "…"} ${what}</b>
      ${about?.indexing > 0 && html`<span class="busy">reading ${about.indexing} more files</span>`}
      ${about && about.searched < about.of && html`
        <span class="busy">searched ${about.searched} of ${about.of} files</span>`}
      ${Object.keys(filters(query)).length > 0 && html`<button onClick=${() => amend(clear)}>clear</button>`}
    </div>
    <details class="filters" open=${innerWidth > 900 || undefined}><summary>filters</summary>
      <${Fields} query=${query} value=${value} />
      <div class="bar presets">${PRESETS.map((preset) => html`<${Preset} query=${query} preset=${preset} />`)}</div>
    </details><${Problem} error=${error} />
    ${unknown.map((one) => html`
      <${Problem} error=${`the address asks for ${one}, which is no filter of this list`} />`)}
    ${about?.broken?.map((one) => html`<${Problem} error=${`left out, because it cannot be read: ${one}`} />`)}`;
}

function Fields({ query, value }) {
  const change = (field) => (e) => amend({ [field]: e.target.value.trim() });
  const counted = (field) => value?.facets[field] || [];
  const chosen = (field) => (query[field] ? [query[field]] : []);
  const options = (field) => [...new Set([...chosen(field), ...counted(field).map(([one]) => one)])];
  const count = (field, one) => counted(field).find(([other]) => other === one)?.[1];
  const told = (field, one) => visible(one) + (count(field, one) ? ` (${number(count(field, one))})` : "");
  const select = (field, label, ids, text = visible) => html`<label>${label}
    ${" "}<select value=${query[field] || ""} onChange=${change(field)}><option value="">all</option>
      ${ids.map((one) => html`<option value=${one}>${text(one)}</option>`)}</select></label>`;
  return html`<div class="bar filters">
    ${value?.stages.length > 1 && select("stage", "stage", value.stages)}
    ${(value?.facets.part?.length > 1 || query.part) && select("part", "of", options("part"))}
    ${FIELDS.filter((field) => options(field).length > 0)
      .map((field) => select(field, field, options(field), (one) => told(field, one)))}
    ${select("kept", "kept", ["yes", "no"])}
    ${Object.entries(RANGES).map(([field, label]) => html`<label>${label}
      ${" "}<input class="range" placeholder="5..9" value=${query[field] || ""} onChange=${change(field)} /></label>`)}
    ${query.problem && html`<span class="chip">problem ${visible(query.problem.slice(0, 12))}
      ${" "}<button aria-label="all problems" onClick=${() => amend({ problem: "" })}>×</button></span>`}</div>`;
}

function Preset({ query, preset: [label, wanted] }) {
  const active = Object.entries(wanted).every(([key, one]) => query[key] === one);
  const without = Object.fromEntries(Object.keys(wanted).map((key) => [key, ""]));
  const turn = () => amend(active ? without : wanted);
  return html`<button aria-pressed=${active} class="chip" onClick=${turn}>${label}</button>`;
}

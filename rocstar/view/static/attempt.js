// One attempt: its turns as people read them, or its tokens (tokens.js); two attempts side by side.

import { placed } from "./group.js";
import {
  amend, Code, html, link, number, ofRun, place, Problem, seconds, signed, Term, Text, useAnswer, useKeys, Verdict,
  visible,
} from "./lib.js";
import { withMath } from "./math.js";
import { Tabs } from "./run.js";
import { COLOURS, Tokens } from "./tokens.js";

export function AttemptPage({ name }) {
  const { query } = place();
  const { part, step, third: row } = placed(query.at);
  const { value, error, fresh } = useAnswer(ofRun(name, "attempt"), { part, step, row, tried: query.tried });
  const other = placed(query.with);
  const its = { part: other.part, step: other.step, row: other.third, tried: query.tried };
  const second = useAnswer(query.with ? ofRun(name, "attempt") : "", its);
  const group = useAnswer(value && fresh ? ofRun(name, "group") : "", { part, step, grp: value?.grp });
  const rows = group.value?.siblings || [];
  const go = (by) => {
    const next = rows[rows.findIndex((one) => String(one.row) === row) + by];
    if (next) amend({ at: `${part}:${step}:${next.row}` });
  };
  const up = () => value && (location.hash = link(["run", name, "group"], { at: `${part}:${step}:${value.grp}` }));
  useKeys({ n: () => go(1), p: () => go(-1), g: up, c: () => amend({ colour: nextColour(query.colour) }) });
  if (!value) return html`<${Tabs} name=${name} tab="attempts" /><${Problem} error=${error} />`;
  const title = part.startsWith("rollouts") ? `step ${number(+step)}` : visible(part);
  const absent = (id) => id !== "none" && !has(value, id);
  const option = ([id, label]) => html`<option value=${id} disabled=${absent(id)}>${label}</option>`;
  return html`<${Tabs} name=${name} tab="attempts" />
    <div class="bar"><h1>${title} · attempt ${value.index}</h1>
      <button onClick=${() => go(-1)}>← <kbd>p</kbd></button><button onClick=${() => go(1)}><kbd>n</kbd> →</button>
      <button onClick=${up}>group <kbd>g</kbd></button>
      <label>colour <select value=${query.colour || "none"} onChange=${(e) => amend({ colour: e.target.value })}>
        ${Object.entries(COLOURS).map(option)}</select></label>
      <label>formulas <select value=${query.tex || ""} onChange=${(e) => amend({ tex: e.target.value })}>
        <option value="">drawn</option><option value="written">as written</option></select></label></div>
    <${Strip} name=${name} query=${query} rows=${rows} row=${row} />
    <div class=${second.value ? "two" : ""}><${Attempt} value=${value} colour=${query.colour} />
      <${Problem} error=${second.error} />
      ${second.value && html`<${Attempt} value=${second.value} colour=${query.colour} />`}</div>`;
}

function nextColour(now) {
  const ids = Object.keys(COLOURS);
  return ids[(ids.indexOf(now || "none") + 1) % ids.length];
}

function has({ tokens, advantage }, colour) {
  if (!tokens) return false;
  const gap = tokens.old_logprobs && tokens.sampled_logprobs;
  const numbers = { entropy: tokens.entropies, gap, logprob: tokens.sampled_logprobs };
  return { ...numbers, advantage: advantage !== null, author: true }[colour];
}

function Strip({ name, query, rows, row }) {
  if (rows.length < 2) return null;
  const at = (one) => `${one.part}:${one.step}:${one.row}`;
  const others = rows.filter((one) => String(one.row) !== row);
  return html`<nav class="strip" aria-label="Siblings">${rows.map((one) => html`
      <a class="${one.verdict || "none"} ${one.kept ? "kept" : ""}"
        aria-current=${String(one.row) === row ? "page" : undefined}
        href=${link(["run", name, "attempt"], { ...query, at: at(one) })}
        title=${`${one.sibling}: ${one.verdict || "no verdict"}, ${one.reason || ""}`}>${one.sibling}</a>`)}
    <label>beside <select value=${query.with || ""} onChange=${(e) => amend({ with: e.target.value })}>
      <option value="">none</option>
      ${others.map((one) => html`<option value=${at(one)}>${one.sibling}, ${one.verdict || "no verdict"}</option>`)}
    </select></label></nav>`;
}

export function Attempt({ value, colour }) {
  const wanted = colour && colour !== "none";
  const coloured = wanted && has(value, colour);
  const absent = value.tokens
    ? `${COLOURS[colour]}: not recorded for this attempt${value.kept ? "" : ", which was not learnt from"}`
    : "tokens have no text here: no tokenizer was found";
  return html`<div class="attempt"><${Facts} value=${value} />
    ${(value.prompt_messages || []).slice(0, -1).map((one) => html`<section class="turn user">
      <h2 class="label">${visible(one.role)}</h2><${Text} text=${one.content} kind="question" write=${withMath} />
    </section>`)}
    <section class="turn user"><h2 class="label">problem</h2>
      <${Text} text=${value.question} kind="question" write=${withMath} /></section>
    ${wanted && !coloured && html`<p class="dim">${absent}</p>`}
    ${coloured ? html`<${Tokens} value=${value} colour=${colour} />`
      : value.turns.map((turn, at) => html`<${Turn} key=${at} turn=${turn} at=${at} />`)}
    ${value.fields && html`<details class="card" open><summary>what else was written</summary>
      <table class="plain settings"><tbody>${Object.entries(value.fields).map(([name, one]) => html`<tr>
        <th scope="row">${visible(name)}</th>
        <td><${Text} text=${typeof one === "string" ? one : JSON.stringify(one)} most=${2000} /></td></tr>`)}
      </tbody></table></details>`}</div>`;
}

function Facts({ value }) {
  const { turns, calls, failed_calls: failed } = value;
  const parts = Object.entries(value.reward_parts ?? {}).map(([name, part]) => `${visible(name)} ${number(part)}`);
  const unread = ["function", "agent"].includes(value.method) ? "not extracted" : "none";
  return html`<section class="card facts"><${Verdict} verdict=${value.verdict} />
    <span>answer <b class="answer">${visible(value.extracted ?? unread)}</b>
      ${" "}<span class="dim">right: ${visible(value.gold)} · by ${visible(value.method ?? "nobody")}</span></span>
    ${value.reason && html`<span class="fate ${value.kept ? "kept" : ""}"><${Term} name=${value.reason} /></span>`}
    ${value.advantage !== null && html`<span><${Term} name="advantage" /> <b>${signed(value.advantage)}</b></span>`}
    ${value.penalty_total !== null && html`<${Penalty} value=${value} />`}
    <span>${number(value.response_tokens)} tokens · ${turns.length} turn${turns.length === 1 ? "" : "s"} ·
      ${" "}${number(calls)} ${calls === 1 ? "call" : "calls"}
      ${failed > 0 && html`, <span class="warn">${failed} failed</span>`}
      ${value.stop && ` · ended: ${visible(value.stop)}`}</span>
    ${(value.fields || value.reward_parts) && html`<span>reward <b>${number(value.reward)}</b>${" "}
      <span class="dim">${parts.join(" · ")} ${value.fields && value.seconds && seconds(value.seconds)}</span></span>`}
    ${value.fault && html`<span class="problem">our fault: ${visible(value.fault)}</span>`}
    <${TimeLine} value=${value} /></section>`;
}

/** The parts of the penalty; what is neither of calls nor of form is of repetition. */
function Penalty({ value: { penalty_total: total, penalty_errors: calls, penalty_format: form } }) {
  const rest = total - calls - form;
  return html`<span><${Term} name="penalty" /> <b>${number(total)}</b> <span class="dim">
    <${Term} name="penalty_errors" label="calls" /> ${number(calls)} + <${Term} name="penalty_format" label="form" />
    ${" "}${number(form)}${rest > 1e-6 && ` + repetition ${number(rest)}`}</span></span>`;
}

/** Segments of the attempt's time, turn by turn. Where a run did not record the engine's time of each turn (older
 * ones), its sum is shared out by tokens, and the page says so. */
function TimeLine({ value }) {
  if (!value.seconds || value.fields) return null; // others do not tell it by turns
  const recorded = value.turns.every((turn) => turn.engine_seconds != null);
  const sampled = value.turns.reduce((sum, turn) => sum + turn.sampled_tokens, 0) || 1;
  const shared = Math.max(0, value.seconds - value.tool_seconds) / sampled;
  const engine = (turn) => (recorded ? turn.engine_seconds : shared * turn.sampled_tokens);
  const parts = value.turns.flatMap((turn, at) => [
    { kind: "engine", seconds: engine(turn), text: `turn ${at + 1}: engine` },
    ...toolParts(turn, `turn ${at + 1}: `),
  ]);
  const rest = Math.max(0, value.seconds - parts.reduce((sum, part) => sum + part.seconds, 0));
  const all = [...parts, { kind: "rest", seconds: rest, text: "other" }].filter((part) => part.seconds > 0);
  const sum = (kind) => all.filter((part) => part.kind === kind).reduce((total, part) => total + part.seconds, 0);
  const piece = (part) => html`<i class=${part.kind} style=${{ flexGrow: part.seconds }}
    title=${`${part.text} ${seconds(part.seconds)}`}></i>`;
  const key = ([kind, label]) => html`<span class="key ${kind}">${label} ${seconds(sum(kind))}</span> `;
  return html`<div class="time">
    <div class="lane" role="img" aria-label="Time of the attempt">${all.map(piece)}</div>
    <span class="dim"><b>${seconds(value.seconds)}</b> = ${LANE.filter(([kind]) => sum(kind) > 0).map(key)}
      <span>(engine${recorded ? ": its queue included" : " by turns: not recorded, shared out by tokens"})</span>
    </span></div>`;
}

const LANE = [["engine", "engine"], ["tool", "tool"], ["queue", "waiting for the tool"], ["rest", "other"]];

/** Waiting and running of a turn's calls one after the other; as one where they ran side by side. */
function toolParts({ calls, tool_seconds: whole }, name) {
  const parts = calls.flatMap(({ result }) => (result ? [
    { kind: "queue", seconds: result.queue_seconds, text: name + "waiting for the tool" },
    { kind: "tool", seconds: result.run_seconds, text: name + "tool" },
  ] : []));
  const sum = parts.reduce((total, part) => total + part.seconds, 0);
  if (whole == null) return parts;
  if (sum > whole) return [{ kind: "tool", seconds: whole, text: name + "tools side by side" }];
  return [...parts, { kind: "rest", seconds: whole - sum, text: name + "finding calls, sending, checking" }];
}

function Turn({ turn, at }) {
  const facts = [
    ...(turn.sampled_tokens != null ? [`${number(turn.sampled_tokens)} tokens`] : []),
    ...(turn.engine_seconds != null ? [seconds(turn.engine_seconds)] : []),
    ...(turn.prompt_tokens ? [`begins anew after ${number(turn.prompt_tokens)} tokens`] : []),
    ...(turn.finish !== "stop" ? [`ended by ${turn.finish}`] : []),
    ...versions(turn),
  ];
  const part = ({ call, text }) =>
    call ? html`<${Call} call=${call} />` : html`<${Text} text=${text} write=${withMath} />`;
  return html`<section class="turn policy">
      <h2 class="label">turn ${at + 1} <span class="dim">${facts.join(", ")}</span></h2>
      ${segments(turn).map(part)}</section>
    ${turn.calls.map((call) => call.result && html`<${Reply} call=${call} />`)}
    ${turn.replies?.map(({ role, text }) => html`<section class="turn user"><h2 class="label">${visible(role)}</h2>
      <${Text} text=${text} write=${withMath} /></section>`)}`;
}

function versions({ version_spans: spans }) {
  if (spans.length < 2) return [];
  return [`weights ${spans.map(([version, tokens]) => `${version}: ${tokens}`).join(" then ")}`];
}

/** A turn's text with each call in its place; segments are counted in whole characters, not in halves of pairs. */
function segments({ text, calls, segments: places }) {
  const letters = [...text];
  const parts = places.map(([start, end, call]) => (
    call === null ? { text: letters.slice(start, end).join("").trim() } : { call: calls[call] }));
  return parts.filter((part) => part.call || part.text);
}

function Call({ call }) {
  const code = call.arguments?.code;
  const other = Object.keys(call.arguments || {}).length ? JSON.stringify(call.arguments, null, 1) : call.raw;
  return html`<div class="call"><h3 class="label">${visible(call.tool || "call that does not parse")}
      ${call.parse_error && html` <span class="warn">${visible(call.parse_error)}</span>`}</h3>
    ${typeof code === "string" ? html`<${Code} text=${code} />` : html`<${Text} text=${other} />`}</div>`;
}

/** What the model read of a result; all that the tool said is folded below where that is something else. */
function Reply({ call }) {
  const { result, error } = call;
  const ok = result.status === "ok";
  const outputs = [result.stdout, result.value, result.stderr].filter(Boolean);
  const known = typeof result.read === "string";
  const more = outputs.join("\n").trim() !== result.read?.trim();
  const facts = [
    ...(result.run_seconds != null
      ? [`${seconds(result.run_seconds)}, waited ${seconds(result.queue_seconds)}`] : []),
    ...(result.truncated_bytes ? [`${number(result.truncated_bytes)} bytes cut`] : []),
    ...(result.isolation ? [visible(result.isolation)] : []),
  ];
  return html`<section class="turn tool ${ok ? "" : "failed"}">
    <h2 class="label"><span class=${ok ? "good" : "warn"}>${ok ? "✓ ok" : "✗ " + (error || result.status)}</span>
      <span class="dim">${facts.join(", ")}</span></h2>
    ${known ? html`<h3 class="label">the model read</h3><${Text} text=${result.read || "(nothing)"} most=${2000} />`
      : html`<${Output} result=${result} />`}
    ${known && more && outputs.length > 0 && html`<details>
      <summary>all that the tool said, ${number(outputs.join("").length)} characters</summary>
      <${Output} result=${result} /></details>`}</section>`;
}

function Output({ result: { stdout, value, stderr } }) {
  return html`${stdout && html`<${Text} text=${stdout} most=${2000} />`}
    ${value && html`<${Text} text=${value} most=${2000} />`}
    ${stderr && html`<${Text} text=${stderr} kind="err" most=${2000} />`}
    ${!stdout && !value && !stderr && html`<p class="dim">no output</p>`}`;
}

// One attempt: its turns as people read them, or its tokens coloured by a number; two attempts side by side.

import { placed } from "./group.js";
import { amend, Code, html, link, number, ofRun, percent, place, Problem, seconds, signed, Text, useAnswer, useKeys, useMemo, useState, Verdict, visible } from "./lib.js";
import { Tabs } from "./run.js";

const COLOURS = { none: "nothing", entropy: "entropy", gap: "engine − learner", logprob: "logprob", advantage: "advantage", author: "author" };

export function AttemptPage({ name }) {
  const { query } = place();
  const { part, step, third: row } = placed(query.at);
  const { value, error } = useAnswer(ofRun(name, "attempt"), { part, step, row });
  const other = placed(query.with);
  const second = useAnswer(query.with ? ofRun(name, "attempt") : "", { part: other.part, step: other.step, row: other.third });
  const group = useAnswer(value ? ofRun(name, "group") : "", { part, step, grp: value?.grp });
  const rows = group.value?.siblings || [];
  const go = (by) => {
    const next = rows[rows.findIndex((one) => String(one.row) === row) + by];
    if (next) amend({ at: `${part}:${step}:${next.row}` });
  };
  const up = () => value && (location.hash = link(["run", name, "group"], { at: `${part}:${step}:${value.grp}` }));
  useKeys({ n: () => go(1), p: () => go(-1), g: up, c: () => amend({ colour: nextColour(query.colour) }) });
  if (!value) return html`<${Tabs} name=${name} tab="attempts" /><${Problem} error=${error} />`;
  return html`<${Tabs} name=${name} tab="attempts" />
    <div class="bar"><h1>${part === "rollouts" ? `step ${number(+step)}` : visible(part)} · attempt ${value.index}</h1><button onClick=${() => go(-1)}>← <kbd>p</kbd></button><button onClick=${() => go(1)}><kbd>n</kbd> →</button><button onClick=${up}>group <kbd>g</kbd></button>
      <label>colour <select value=${query.colour || "none"} onChange=${(e) => amend({ colour: e.target.value })}>${Object.entries(COLOURS).map(([id, label]) => html`<option value=${id} disabled=${id !== "none" && !has(value, id)}>${label}</option>`)}</select></label></div>
    <${Strip} name=${name} query=${query} rows=${rows} row=${row} />
    <div class=${second.value ? "two" : ""}><${Attempt} value=${value} colour=${query.colour} /><${Problem} error=${second.error} />${second.value && html`<${Attempt} value=${second.value} colour=${query.colour} />`}</div>`;
}

const nextColour = (now) => Object.keys(COLOURS)[(Object.keys(COLOURS).indexOf(now || "none") + 1) % Object.keys(COLOURS).length];

function has({ tokens, advantage }, colour) {
  if (!tokens) return false;
  return { entropy: tokens.entropies, gap: tokens.old_logprobs && tokens.sampled_logprobs, logprob: tokens.sampled_logprobs, advantage: advantage !== null, author: true }[colour];
}

function Strip({ name, query, rows, row }) {
  if (rows.length < 2) return null;
  return html`<nav class="strip" aria-label="Siblings">${rows.map((one) => html`<a class="${one.verdict || "none"} ${one.kept ? "kept" : ""}" aria-current=${String(one.row) === row ? "page" : undefined}
      href=${link(["run", name, "attempt"], { ...query, at: `${one.part}:${one.step}:${one.row}` })} title=${`${one.sibling}: ${one.verdict || "no verdict"}, ${one.reason || ""}`}>${one.sibling}</a>`)}
    <label>beside <select value=${query.with || ""} onChange=${(e) => amend({ with: e.target.value })}><option value="">none</option>${rows.filter((one) => String(one.row) !== row).map((one) => html`<option value=${`${one.part}:${one.step}:${one.row}`}>${one.sibling}, ${one.verdict || "no verdict"}</option>`)}</select></label></nav>`;
}

function Attempt({ value, colour }) {
  const coloured = colour && colour !== "none" && has(value, colour);
  return html`<div class="attempt"><section class="card facts"><${Verdict} verdict=${value.verdict} /><span>answer <b class="answer">${visible(value.extracted ?? "none")}</b> <span class="dim">right: ${visible(value.gold)} · by ${value.method ?? "nobody"}</span></span>
      ${value.reason && html`<span><span class="fate ${value.kept ? "kept" : ""}">${value.reason}</span></span>`}${value.advantage !== null && html`<span>advantage <b>${signed(value.advantage)}</b></span>`}
      ${value.penalty_total !== null && html`<span>penalty <b>${number(value.penalty_total)}</b> <span class="dim">calls ${number(value.penalty_errors)} + form ${number(value.penalty_format)}</span></span>`}
      <span>${number(value.response_tokens)} tokens · ${value.turns.length} turns · ${value.calls} calls${value.failed_calls > 0 && html`, <span class="warn">${value.failed_calls} failed</span>`} · ended: ${value.stop}</span>
      ${value.fault && html`<span class="problem">our fault: ${visible(value.fault)}</span>`}<${TimeLine} value=${value} /></section>
    <section class="turn user"><h2 class="label">problem</h2><${Text} text=${value.question} kind="question" /></section>
    ${coloured ? html`<${Tokens} value=${value} colour=${colour} />` : value.turns.map((turn, at) => html`<${Turn} key=${at} turn=${turn} at=${at} />`)}</div>`;
}

/** Segments of the attempt's time. The engine's is known in sum only and is shared out by tokens. */
function TimeLine({ value }) {
  const sampled = value.turns.reduce((sum, turn) => sum + turn.sampled_tokens, 0) || 1;
  const engine = Math.max(0, value.seconds - value.tool_seconds);
  const parts = value.turns.flatMap((turn, at) => [
    { kind: "engine", seconds: (engine * turn.sampled_tokens) / sampled, text: `turn ${at + 1}: engine` },
    ...turn.calls.flatMap(({ result }) => (result ? [{ kind: "queue", seconds: result.queue_seconds, text: `turn ${at + 1}: waiting for the tool` }, { kind: "tool", seconds: result.run_seconds, text: `turn ${at + 1}: tool` }] : [])),
  ]);
  const named = parts.reduce((sum, part) => sum + part.seconds, 0);
  const rest = Math.max(0, value.seconds - named);
  const sum = (kind) => parts.filter((part) => part.kind === kind).reduce((total, part) => total + part.seconds, 0);
  if (!value.seconds) return null;
  return html`<div class="time"><div class="lane" role="img" aria-label="Time of the attempt">${[...parts, { kind: "rest", seconds: rest, text: "other waiting" }].filter((part) => part.seconds > 0).map((part) =>
      html`<i class=${part.kind} style=${{ flexGrow: part.seconds }} title=${`${part.text} ${seconds(part.seconds)}`}></i>`)}</div>
    <span class="dim"><b>${seconds(value.seconds)}</b> = <span class="key engine">engine ${seconds(sum("engine"))}</span> <span class="key tool">tool ${seconds(sum("tool"))}</span> <span class="key queue">queue ${seconds(sum("queue"))}</span> <span class="key rest">other ${seconds(rest)}</span> <span>(engine by turns: shared out by tokens)</span></span></div>`;
}

function Turn({ turn, at }) {
  return html`<section class="turn policy"><h2 class="label">turn ${at + 1} <span class="dim">${number(turn.sampled_tokens)} tokens${turn.finish !== "stop" ? `, ended by ${turn.finish}` : ""}${versions(turn)}</span></h2>
      ${segments(turn).map((part) => (part.call ? html`<${Call} call=${part.call} />` : html`<${Text} text=${part.text} />`))}</section>
    ${turn.calls.map((call) => call.result && html`<${Reply} call=${call} />`)}`;
}

const versions = ({ version_spans: spans }) => (spans.length > 1 ? `, weights ${spans.map(([version, tokens]) => `${version}: ${tokens}`).join(" then ")}` : "");

/** A turn's text with each call in its place. */
function segments({ text, calls }) {
  const parts = [];
  let rest = text;
  for (const call of calls) {
    const at = call.raw ? rest.indexOf(call.raw) : -1;
    if (at >= 0) {
      parts.push({ text: trimmed(rest.slice(0, at)) });
      rest = rest.slice(at + call.raw.length);
    }
    parts.push({ call });
  }
  return [...parts, { text: trimmed(rest) }].filter((part) => part.call || part.text);
}

const trimmed = (text) => text.replace(/^\s*<\/tool_call>/, "").replace(/<tool_call>\s*$/, "").replace(/<\|im_end\|>\s*$/, "").trim();

function Call({ call }) {
  const code = call.arguments?.code;
  return html`<div class="call"><h3 class="label">${visible(call.tool || "call that does not parse")}${call.parse_error && html` <span class="warn">${visible(call.parse_error)}</span>`}</h3>
    ${typeof code === "string" ? html`<${Code} text=${code} />` : html`<${Text} text=${Object.keys(call.arguments || {}).length ? JSON.stringify(call.arguments, null, 1) : call.raw} />`}</div>`;
}

function Reply({ call }) {
  const { result, error } = call;
  const empty = !result.stdout && !result.stderr && !result.value;
  return html`<section class="turn tool ${result.status === "ok" ? "" : "failed"}"><h2 class="label"><span class=${result.status === "ok" ? "good" : "warn"}>${result.status === "ok" ? "✓ ok" : "✗ " + (error || result.status)}</span>
      <span class="dim">${seconds(result.run_seconds)}, waited ${seconds(result.queue_seconds)}${result.truncated_bytes ? `, ${number(result.truncated_bytes)} bytes cut` : ""}${result.isolation ? `, ${visible(result.isolation)}` : ""}</span></h2>
    ${result.stdout && html`<${Text} text=${result.stdout} most=${2000} />`}${result.value && html`<${Text} text=${result.value} most=${2000} />`}${result.stderr && html`<${Text} text=${result.stderr} kind="err" most=${2000} />`}${empty && html`<p class="dim">no output</p>`}</section>`;
}

// -- tokens --------------------------------------------------------------------------------------------------------

const STEPS = 9;

function Tokens({ value, colour }) {
  const { tokens } = value;
  const [seen, look] = useState(null);
  const shade = useMemo(() => shadeOf(value, colour), [value, colour]);
  const over = (event) => event.target.dataset.i !== undefined && look(+event.target.dataset.i);
  const marked = () => [...document.querySelectorAll(".token.s8, .token.s7, .token.n4, .token.p4")];
  const jump = (by) => {
    const found = marked(), at = found.findIndex((one) => one.classList.contains("here"));
    found[at]?.classList.remove("here");
    const next = found[(at + by + found.length) % found.length];
    next?.classList.add("here");
    next?.scrollIntoView({ block: "center" });
    if (next) look(+next.dataset.i);
  };
  useKeys({ "]": () => jump(1), "[": () => jump(-1) });
  const parts = [["prompt", "user"], ...value.turns.flatMap((_, at) => [[`turn ${at + 1}`, "policy"], [`reply to turn ${at + 1}`, "tool"]])];
  return html`<div class="legend card"><span>${COLOURS[colour]}</span><span class="ramp">${shade.legend.map(([kind, text]) => html`<i class="token ${kind}">${text}</i>`)}</span><span class="dim">strongest: <kbd>[</kbd> <kbd>]</kbd></span></div>
    <div class="tokens" onMouseOver=${over} onClick=${over}>${parts.map(([label, kind], at) => {
      const [from, to] = [tokens.starts[at], tokens.starts[at + 1] ?? tokens.pieces.length];
      return to > from && html`<section class="turn ${kind}" key=${at}><h2 class="label">${label}</h2>${blocks(from, to).map(([a, b]) => html`<${Block} key=${a} tokens=${tokens} from=${a} to=${b} shade=${kind === "policy" ? shade.of : shade.others(kind)} />`)}</section>`;
    })}</div>
    ${seen !== null && html`<${Card} value=${value} at=${seen} />`}`;
}

const blocks = (from, to) => Array.from({ length: Math.ceil((to - from) / 512) }, (_, n) => [from + 512 * n, Math.min(to, from + 512 * (n + 1))]);

/** A block of tokens; blocks out of view are not laid out (content-visibility). */
function Block({ tokens, from, to, shade }) {
  return useMemo(() => html`<div class="text block" dir="auto">${tokens.pieces.slice(from, to).map((piece, n) => html`<span class="token ${shade(from + n)}" data-i=${from + n}>${visible(piece)}</span>`)}</div>`, [tokens, shade, from, to]);
}

function shadeOf({ tokens, advantage }, colour) {
  const plain = () => "";
  const others = () => plain;
  if (colour === "author") return { of: () => "a-policy", others: (kind) => () => "a-" + kind, legend: [["a-policy", "policy"], ["a-user", "prompt"], ["a-tool", "tool"]] };
  if (colour === "advantage") return { of: () => (advantage > 0 ? "p2" : advantage < 0 ? "n2" : ""), others, legend: [["n2", "below 0"], ["p2", "above 0"], ["", signed(advantage)]] };
  const values = { entropy: tokens.entropies, logprob: tokens.sampled_logprobs?.map((one) => (one === null ? null : -one)), gap: difference(tokens) }[colour];
  const size = [...values].filter((one) => one !== null && one !== 0).map(Math.abs).sort((a, b) => a - b);
  const top = round(size[Math.floor(0.99 * (size.length - 1))] || 1e-6);
  if (colour === "gap") {
    const of = (at) => { const step = Math.min(4, Math.round((4 * Math.abs(values[at] ?? 0)) / top)); return step ? (values[at] > 0 ? "p" : "n") + step : ""; };
    return { of, others, legend: [["n4", `−${number(top)}`], ["n2", `−${number(top / 2)}`], ["", "0"], ["p2", `+${number(top / 2)}`], ["p4", `+${number(top)} nats`]] };
  }
  const sign = colour === "logprob" ? "−" : "";
  return { of: (at) => "s" + Math.min(STEPS - 1, Math.round(((STEPS - 1) * (values[at] ?? 0)) / top)), others, legend: [["s0", "0"], ["s2", sign + number(top / 4)], ["s4", sign + number(top / 2)], ["s8", `${sign}${number(top)} nats`]] };
}

const difference = ({ sampled_logprobs: a, old_logprobs: b }) => a && b && a.map((one, at) => (one === null || b[at] === null ? null : one - b[at]));
const round = (value) => Number(value.toPrecision(1));

function Card({ value, at }) {
  const { tokens } = value, gap = difference(tokens)?.[at];
  return html`<aside class="token-card" aria-live="off"><b>“${visible(tokens.pieces[at])}”</b>${tokens.lengths[at] > 1 && html`<span>${tokens.lengths[at]} tokens</span>`}
    <span>entropy ${number(tokens.entropies?.[at])}</span><span>logprob ${number(tokens.sampled_logprobs?.[at])}</span><span>chance ${tokens.sampled_logprobs?.[at] != null ? percent(Math.exp(tokens.sampled_logprobs[at])) : "–"}</span><span>learner ${number(tokens.old_logprobs?.[at])}</span><span>gap ${number(gap)}</span></aside>`;
}

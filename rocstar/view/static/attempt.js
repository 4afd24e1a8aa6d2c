// One attempt: its turns as people read them, or its tokens coloured by a number; two attempts side by side.

import { color } from "./chart.js";
import { placed } from "./group.js";
import { amend, Code, html, link, number, ofRun, percent, place, Problem, seconds, signed, Text, useAnswer, useEffect, useKeys, useMemo, useRef, useState, Verdict, visible } from "./lib.js";
import { Tabs } from "./run.js";

const COLOURS = { none: "nothing", entropy: "entropy", gap: "engine − learner", logprob: "logprob", advantage: "advantage", author: "author" };

export function AttemptPage({ name }) {
  const { query } = place();
  const { part, step, third: row } = placed(query.at);
  const { value, error, fresh } = useAnswer(ofRun(name, "attempt"), { part, step, row });
  const other = placed(query.with);
  const second = useAnswer(query.with ? ofRun(name, "attempt") : "", { part: other.part, step: other.step, row: other.third });
  const group = useAnswer(value && fresh ? ofRun(name, "group") : "", { part, step, grp: value?.grp });
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
      <span>${number(value.response_tokens)} tokens · ${value.turns.length} turn${value.turns.length === 1 ? "" : "s"} · ${value.calls} calls${value.failed_calls > 0 && html`, <span class="warn">${value.failed_calls} failed</span>`} · ended: ${value.stop}</span>
      ${value.fault && html`<span class="problem">our fault: ${visible(value.fault)}</span>`}<${TimeLine} value=${value} /></section>
    <section class="turn user"><h2 class="label">problem</h2><${Text} text=${value.question} kind="question" /></section>
    ${colour && colour !== "none" && !coloured && html`<p class="dim">${value.tokens ? `${COLOURS[colour]}: not recorded for this attempt${value.kept ? "" : ", which was not learnt from"}` : "tokens have no text here: no tokenizer was found"}</p>`}
    ${coloured ? html`<${Tokens} value=${value} colour=${colour} />` : value.turns.map((turn, at) => html`<${Turn} key=${at} turn=${turn} at=${at} />`)}</div>`;
}

/** Segments of the attempt's time, turn by turn. Where a run did not record the engine's time of each turn (older ones),
 * its sum is shared out by tokens, and the page says so. */
function TimeLine({ value }) {
  if (!value.seconds) return null;
  const recorded = value.turns.every((turn) => turn.engine_seconds != null);
  const sampled = value.turns.reduce((sum, turn) => sum + turn.sampled_tokens, 0) || 1;
  const shared = Math.max(0, value.seconds - value.tool_seconds) / sampled;
  const parts = value.turns.flatMap((turn, at) => [
    { kind: "engine", seconds: recorded ? turn.engine_seconds : shared * turn.sampled_tokens, text: `turn ${at + 1}: engine` },
    ...toolParts(turn, `turn ${at + 1}: `),
  ]);
  const rest = Math.max(0, value.seconds - parts.reduce((sum, part) => sum + part.seconds, 0));
  const all = [...parts, { kind: "rest", seconds: rest, text: "other" }].filter((part) => part.seconds > 0);
  const sum = (kind) => all.filter((part) => part.kind === kind).reduce((total, part) => total + part.seconds, 0);
  return html`<div class="time"><div class="lane" role="img" aria-label="Time of the attempt">${all.map((part) => html`<i class=${part.kind} style=${{ flexGrow: part.seconds }} title=${`${part.text} ${seconds(part.seconds)}`}></i>`)}</div>
    <span class="dim"><b>${seconds(value.seconds)}</b> = ${LANE.filter(([kind]) => sum(kind) > 0).map(([kind, label]) => html`<span class="key ${kind}">${label} ${seconds(sum(kind))}</span> `)}<span>${recorded ? "(engine: its queue included)" : "(engine by turns: not recorded, shared out by tokens)"}</span></span></div>`;
}

const LANE = [["engine", "engine"], ["tool", "tool"], ["queue", "waiting for the tool"], ["rest", "other"]];

/** Waiting and running of a turn's calls one after the other; as one where they ran side by side. */
function toolParts({ calls, tool_seconds: whole }, name) {
  const parts = calls.flatMap(({ result }) => (result ? [{ kind: "queue", seconds: result.queue_seconds, text: name + "waiting for the tool" }, { kind: "tool", seconds: result.run_seconds, text: name + "tool" }] : []));
  const sum = parts.reduce((total, part) => total + part.seconds, 0);
  if (whole == null) return parts;
  return sum > whole ? [{ kind: "tool", seconds: whole, text: name + "tools side by side" }] : [...parts, { kind: "rest", seconds: whole - sum, text: name + "finding calls, sending, checking" }];
}

function Turn({ turn, at }) {
  return html`<section class="turn policy"><h2 class="label">turn ${at + 1} <span class="dim">${number(turn.sampled_tokens)} tokens${turn.engine_seconds != null ? `, ${seconds(turn.engine_seconds)}` : ""}${turn.finish !== "stop" ? `, ended by ${turn.finish}` : ""}${versions(turn)}</span></h2>
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
  const [here, jump] = useState(null);
  const shade = useMemo(() => shadeOf(value, colour), [value, colour]);
  const parts = useMemo(() => partsOf(value), [value]);
  const strong = useMemo(() => parts.filter(({ kind }) => kind === "policy").flatMap(({ from, to }) => range(from, to).filter((at) => STRONG.has(shade.of(at)))), [parts, shade]);
  const over = (event) => event.target.dataset.i !== undefined && look(+event.target.dataset.i);
  const next = (by) => {
    const after = by > 0 ? strong.find((at) => at > (here ?? -1)) ?? strong[0] : strong.findLast((at) => at < (here ?? Infinity)) ?? strong.at(-1);
    if (after !== undefined) { jump(after); look(after); }
  };
  useKeys({ "]": () => next(1), "[": () => next(-1) });
  useEffect(() => {
    const token = here === null ? null : document.querySelector(`.token[data-i="${here}"]`);
    token?.classList.add("here");
    token?.scrollIntoView({ block: "center" });
    return () => token?.classList.remove("here");
  }, [here, shade]);
  return html`<div class="legend card"><span>${COLOURS[colour]}</span><span class="ramp">${shade.legend.map(([kind, text]) => html`<i class="token ${kind}">${text}</i>`)}</span><span class="dim">${number(strong.length)} strong: <button aria-label="previous strong token" onClick=${() => next(-1)}><kbd>[</kbd></button> <button aria-label="next strong token" onClick=${() => next(1)}><kbd>]</kbd></button></span>
      <${Course} parts=${parts} shade=${shade} here=${here} go=${(at) => { jump(at); look(at); }} /></div>
    <div class="tokens" onMouseOver=${over} onClick=${over}>${parts.map(({ label, kind, from, to }) => html`<section class="turn ${kind}" key=${from}><h2 class="label">${label}</h2>${blocks(from, to).map(([a, b]) =>
      html`<${Block} key=${a} tokens=${tokens} from=${a} to=${b} shade=${kind === "policy" ? shade.of : shade.others(kind)} wanted=${a < DRAWN_FIRST || (here >= a && here < b)} />`)}</section>`)}</div>
    ${seen !== null && html`<${Card} value=${value} at=${seen} />`}`;
}

const STRONG = new Set(["s8", "s7", "n4", "p4"]);
const BLOCK = 512, DRAWN_FIRST = 1536; // tokens; a screen holds about 1,200
const range = (from, to) => Array.from({ length: to - from }, (_, n) => from + n);
const blocks = (from, to) => Array.from({ length: Math.ceil((to - from) / BLOCK) }, (_, n) => [from + BLOCK * n, Math.min(to, from + BLOCK * (n + 1))]);

/** Who wrote which pieces, in order. */
function partsOf({ tokens, turns }) {
  const named = [["prompt", "user"], ...turns.flatMap((_, at) => [[`turn ${at + 1}`, "policy"], [`reply to turn ${at + 1}`, "tool"]])];
  return named.map(([label, kind], at) => ({ label, kind, from: tokens.starts[at], to: tokens.starts[at + 1] ?? tokens.pieces.length })).filter(({ from, to }) => to > from);
}

/** A block of tokens: one plain text until it comes near the view, a span for each token from then on. */
function Block({ tokens, from, to, shade, wanted }) {
  const box = useRef(null);
  const [near, come] = useState(false);
  const drawn = near || wanted;
  useEffect(() => {
    if (drawn) return;
    const watcher = new IntersectionObserver((found) => found.some((one) => one.isIntersecting) && come(true), { rootMargin: "1200px" });
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, [drawn]);
  return useMemo(() => html`<div class="text block" dir="auto" ref=${box}>${drawn
    ? range(from, to).map((at) => html`<span class="token ${shade(at)}" data-i=${at}>${visible(tokens.pieces[at])}</span>`)
    : visible(tokens.pieces.slice(from, to).join(""))}</div>`, [tokens, shade, from, to, drawn]);
}

/** The whole attempt in one line: the strongest token of each pixel, turns and replies one after the other; a click goes
 * there. */
function Course({ parts, shade, here, go }) {
  const canvas = useRef(null);
  const first = parts[0]?.from ?? 0, size = (parts.at(-1)?.to ?? 0) - first || 1;
  useEffect(() => {
    const paint = () => paintCourse(canvas.current, parts, shade, first, size, here);
    paint();
    const watcher = new ResizeObserver(paint);
    watcher.observe(canvas.current);
    return () => watcher.disconnect();
  }, [parts, shade, here, document.documentElement.dataset.theme]);
  const clicked = ({ offsetX, target }) => go(first + Math.min(size - 1, Math.floor((size * offsetX) / target.clientWidth)));
  return html`<canvas class="course" ref=${canvas} role="img" aria-label="where in the attempt the strong tokens are" onClick=${clicked}></canvas>`;
}

function paintCourse(canvas, parts, shade, first, size, here) {
  const wide = (canvas.width = canvas.clientWidth * devicePixelRatio), tall = (canvas.height = canvas.clientHeight * devicePixelRatio);
  const pen = canvas.getContext("2d"), x = (at) => ((at - first) * wide) / size;
  const fill = (name, left, top, width) => { pen.fillStyle = color(name); pen.fillRect(left, top, width, tall - top); };
  for (const { kind, from, to } of parts) {
    if (kind !== "policy") { fill("--edge", x(from), 0, Math.max(1, x(to) - x(from))); continue; }
    const bars = new Map();
    for (let at = from; at < to; at++) bars.set(Math.floor(x(at)), Math.max(bars.get(Math.floor(x(at))) ?? 0, shade.size(at)));
    pen.fillStyle = color("--line-2");
    const step = Math.max(1, wide / size);
    for (const [left, strength] of bars) pen.fillRect(left, tall * (1 - strength), step, tall * strength);
    fill("--dim", x(from), 0, devicePixelRatio);
  }
  if (here !== null) fill("--ink", x(here), 0, 2 * devicePixelRatio);
}

function shadeOf({ tokens, advantage }, colour) {
  const plain = () => "";
  const others = () => plain;
  if (colour === "author") return { of: () => "a-policy", size: () => 0, others: (kind) => () => "a-" + kind, legend: [["a-policy", "policy"], ["a-user", "prompt"], ["a-tool", "tool"]] };
  if (colour === "advantage") return { of: () => (advantage > 0 ? "p2" : advantage < 0 ? "n2" : ""), size: () => 0, others, legend: [["n2", "below 0"], ["p2", "above 0"], ["", signed(advantage)]] };
  const values = { entropy: tokens.entropies, logprob: tokens.sampled_logprobs?.map((one) => (one === null ? null : -one)), gap: difference(tokens) }[colour];
  const size = [...values].filter((one) => one !== null && one !== 0).map(Math.abs).sort((a, b) => a - b);
  const top = round(size[Math.floor(0.99 * (size.length - 1))] || 1e-6);
  const share = (at) => Math.min(1, Math.abs(values[at] ?? 0) / top);
  if (colour === "gap") {
    const of = (at) => { const step = Math.min(4, Math.round((4 * Math.abs(values[at] ?? 0)) / top)); return step ? (values[at] > 0 ? "p" : "n") + step : ""; };
    return { of, size: share, others, legend: [["n4", `−${number(top)}`], ["n2", `−${number(top / 2)}`], ["", "0"], ["p2", `+${number(top / 2)}`], ["p4", `+${number(top)} nats`]] };
  }
  const sign = colour === "logprob" ? "−" : "";
  return { of: (at) => "s" + Math.min(STEPS - 1, Math.round(((STEPS - 1) * (values[at] ?? 0)) / top)), size: share, others, legend: [["s0", "0"], ["s2", sign + number(top / 4)], ["s4", sign + number(top / 2)], ["s8", `${sign}${number(top)} nats`]] };
}

const difference = ({ sampled_logprobs: a, old_logprobs: b }) => a && b && a.map((one, at) => (one === null || b[at] === null ? null : one - b[at]));
const round = (value) => Number(value.toPrecision(1));

function Card({ value, at }) {
  const { tokens } = value, gap = difference(tokens)?.[at];
  return html`<aside class="token-card" aria-live="off"><b>“${visible(tokens.pieces[at])}”</b>${tokens.lengths[at] > 1 && html`<span>${tokens.lengths[at]} tokens</span>`}
    <span>entropy ${number(tokens.entropies?.[at])}</span><span>logprob ${number(tokens.sampled_logprobs?.[at])}</span><span>chance ${tokens.sampled_logprobs?.[at] != null ? percent(Math.exp(tokens.sampled_logprobs[at])) : "–"}</span><span>learner ${number(tokens.old_logprobs?.[at])}</span><span>gap ${number(gap)}</span></aside>`;
}

// The tokens of an attempt, coloured by a number that belongs to each.

import { color } from "./chart.js";
import { html, number, percent, signed, useEffect, useKeys, useMemo, useRef, useState, visible } from "./lib.js";

export const COLOURS = {
  none: "nothing", entropy: "entropy", gap: "engine − learner", logprob: "logprob", advantage: "advantage",
  author: "author",
};

const STEPS = 9;

export function Tokens({ value, colour }) {
  const { tokens } = value;
  const [seen, look] = useState(null);
  const [here, jump] = useState(null);
  const shade = useMemo(() => shadeOf(value, colour), [value, colour]);
  const parts = useMemo(() => partsOf(value), [value]);
  const strong = useMemo(() => {
    const written = parts.filter(({ kind }) => kind === "policy").flatMap(({ from, to }) => range(from, to));
    return written.filter((at) => STRONG.has(shade.of(at)));
  }, [parts, shade]);
  const over = (event) => event.target.dataset.i !== undefined && look(+event.target.dataset.i);
  const go = (at) => { jump(at); look(at); };
  const next = (by) => {
    const after = by > 0
      ? strong.find((at) => at > (here ?? -1)) ?? strong[0]
      : strong.findLast((at) => at < (here ?? Infinity)) ?? strong.at(-1);
    if (after !== undefined) go(after);
  };
  useKeys({ "]": () => next(1), "[": () => next(-1) });
  useEffect(() => {
    const token = here === null ? null : document.querySelector(`.token[data-i="${here}"]`);
    token?.classList.add("here");
    token?.scrollIntoView({ block: "center" });
    return () => token?.classList.remove("here");
  }, [here, shade]);
  const jumps = [["previous", "[", -1], ["next", "]", 1]].map(([way, key, by]) => html`
    <button aria-label="${way} strong token" onClick=${() => next(by)}><kbd>${key}</kbd></button>`);
  const wanted = (a, b) => a < DRAWN_FIRST || (here >= a && here < b);
  const shaded = (kind) => (kind === "policy" ? shade.of : shade.others(kind));
  return html`<div class="legend card"><span>${COLOURS[colour]}</span>
      <span class="ramp">${shade.legend.map(([kind, text]) => html`<i class="token ${kind}">${text}</i>`)}</span>
      <span class="dim">${number(strong.length)} strong: ${jumps}</span>
      <${Course} parts=${parts} shade=${shade} here=${here} go=${go} /></div>
    <div class="tokens" onMouseOver=${over} onClick=${over}>${parts.map(({ label, kind, from, to }) => html`
      <section class="turn ${kind}" key=${from}><h2 class="label">${label}</h2>
        ${blocks(from, to).map(([a, b]) => html`<${Block} key=${a} tokens=${tokens} from=${a} to=${b}
          shade=${shaded(kind)} wanted=${wanted(a, b)} />`)}</section>`)}</div>
    ${seen !== null && html`<${Card} value=${value} at=${seen} />`}`;
}

const STRONG = new Set(["s8", "s7", "n4", "p4"]);
const BLOCK = 512, DRAWN_FIRST = 1536; // tokens; a screen holds about 1,200
const range = (from, to) => Array.from({ length: to - from }, (_, n) => from + n);

function blocks(from, to) {
  const block = (_, n) => [from + BLOCK * n, Math.min(to, from + BLOCK * (n + 1))];
  return Array.from({ length: Math.ceil((to - from) / BLOCK) }, block);
}

/** Who wrote which pieces, in order. */
function partsOf({ tokens, turns }) {
  const turn = (_, at) => [[`turn ${at + 1}`, "policy"], [`reply to turn ${at + 1}`, "tool"]];
  const { starts, pieces } = tokens;
  return [["prompt", "user"], ...turns.flatMap(turn)]
    .map(([label, kind], at) => ({ label, kind, from: starts[at], to: starts[at + 1] ?? pieces.length }))
    .filter(({ from, to }) => to > from);
}

/** A block of tokens: one plain text until it comes near the view, a span for each token from then on. */
function Block({ tokens, from, to, shade, wanted }) {
  const box = useRef(null);
  const [near, come] = useState(false);
  const drawn = near || wanted;
  useEffect(() => {
    if (drawn) return;
    const seen = (found) => found.some((one) => one.isIntersecting) && come(true);
    const watcher = new IntersectionObserver(seen, { rootMargin: "1200px" });
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, [drawn]);
  return useMemo(() => html`<div class="text block" dir="auto" ref=${box}>${drawn
    ? range(from, to).map((at) => html`
      <span class="token ${shade(at)}" data-i=${at}>${visible(tokens.pieces[at])}</span>`)
    : visible(tokens.pieces.slice(from, to).join(""))}</div>`, [tokens, shade, from, to, drawn]);
}

/** The whole attempt in one line: the strongest token of each pixel, turns and replies one after the other; a click
 * goes there. */
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
  const at = ({ offsetX, target }) => Math.min(size - 1, Math.floor((size * offsetX) / target.clientWidth));
  return html`<canvas class="course" ref=${canvas} role="img" onClick=${(event) => go(first + at(event))}
    aria-label="where in the attempt the strong tokens are"></canvas>`;
}

function paintCourse(canvas, parts, shade, first, size, here) {
  const wide = (canvas.width = canvas.clientWidth * devicePixelRatio);
  const tall = (canvas.height = canvas.clientHeight * devicePixelRatio);
  const pen = canvas.getContext("2d"), x = (at) => ((at - first) * wide) / size;
  const fill = (name, left, top, width) => { pen.fillStyle = color(name); pen.fillRect(left, top, width, tall - top); };
  for (const { kind, from, to } of parts) {
    if (kind !== "policy") { fill("--edge", x(from), 0, Math.max(1, x(to) - x(from))); continue; }
    const bars = new Map();
    for (let at = from; at < to; at++) {
      const pixel = Math.floor(x(at));
      bars.set(pixel, Math.max(bars.get(pixel) ?? 0, shade.size(at)));
    }
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
  if (colour === "author") {
    const legend = [["a-policy", "policy"], ["a-user", "prompt"], ["a-tool", "tool"]];
    return { of: () => "a-policy", size: () => 0, others: (kind) => () => "a-" + kind, legend };
  }
  if (colour === "advantage") {
    const legend = [["n2", "below 0"], ["p2", "above 0"], ["", signed(advantage)]];
    return { of: () => (advantage > 0 ? "p2" : advantage < 0 ? "n2" : ""), size: () => 0, others, legend };
  }
  const surprise = tokens.sampled_logprobs?.map((one) => (one === null ? null : -one));
  const values = { entropy: tokens.entropies, logprob: surprise, gap: difference(tokens) }[colour];
  const size = [...values].filter((one) => one !== null && one !== 0).map(Math.abs).sort((a, b) => a - b);
  const top = round(size[Math.floor(0.99 * (size.length - 1))] || 1e-6);
  const share = (at) => Math.min(1, Math.abs(values[at] ?? 0) / top);
  if (colour === "gap") {
    const of = (at) => {
      const step = Math.min(4, Math.round((4 * Math.abs(values[at] ?? 0)) / top));
      return step ? (values[at] > 0 ? "p" : "n") + step : "";
    };
    const [half, whole] = [number(top / 2), number(top)];
    const legend = [["n4", `−${whole}`], ["n2", `−${half}`], ["", "0"], ["p2", `+${half}`], ["p4", `+${whole} nats`]];
    return { of, size: share, others, legend };
  }
  const sign = colour === "logprob" ? "−" : "";
  const of = (at) => "s" + Math.min(STEPS - 1, Math.round(((STEPS - 1) * (values[at] ?? 0)) / top));
  const [quarter, half, whole] = [top / 4, top / 2, top].map((one) => sign + number(one));
  return { of, size: share, others, legend: [["s0", "0"], ["s2", quarter], ["s4", half], ["s8", whole + " nats"]] };
}


function difference({ sampled_logprobs: a, old_logprobs: b }) {
  return a && b && a.map((one, at) => (one === null || b[at] === null ? null : one - b[at]));
}

const round = (value) => Number(value.toPrecision(1));

function Card({ value: { tokens }, at }) {
  const logprob = tokens.sampled_logprobs?.[at];
  const facts = [
    ...(tokens.lengths[at] > 1 ? [`${tokens.lengths[at]} tokens`] : []),
    `entropy ${number(tokens.entropies?.[at])}`,
    `logprob ${number(logprob)}`,
    `chance ${logprob != null ? percent(Math.exp(logprob)) : "–"}`,
    `learner ${number(tokens.old_logprobs?.[at])}`,
    `gap ${number(difference(tokens)?.[at])}`,
  ];
  return html`<aside class="token-card" aria-live="off"><b>“${visible(tokens.pieces[at])}”</b>
    ${facts.map((fact) => html`<span>${fact}</span>`)}</aside>`;
}

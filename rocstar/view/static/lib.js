// What all views share: the address as state, answers of the server, and how numbers and hostile text are written.

import { html, useEffect, useRef, useState } from "./vendor/preact-htm.js";
export * from "./vendor/preact-htm.js";

// -- address: #/path?name=value holds all that a view shows, so that every view is a link ---------------------------

export function place() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  const parts = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { parts, query: Object.fromEntries(new URLSearchParams(query || "")) };
}

export function link(parts, query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return "#/" + parts.map(encodeURIComponent).join("/") + (text ? "?" + text : "");
}

/** Change some values of the address; an empty value leaves it. */
export function amend(changes, { keep = true } = {}) {
  const { parts, query } = place();
  const address = link(parts, { ...query, ...changes });
  if (keep) location.hash = address;
  else {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  }
}

// -- answers -------------------------------------------------------------------------------------------------------

export async function ask(path, query = {}, signal) {
  const kept = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const answer = await fetch(`/api/${path}?${new URLSearchParams(kept)}`, { signal });
  const value = await answer.json().catch(() => null);
  signal?.throwIfAborted(); // while it was read: that is no answer, though its head said 200
  if (!answer.ok || value === null) throw new Error(value?.error || `the server answered ${answer.status}`);
  return value;
}

export const ofRun = (name, what) => `run/${encodeURIComponent(name)}${what ? "/" + what : ""}`;

/** The answer to a question (`fresh`), or to the one before until it comes; asked again every `every` seconds while
 * `again(answer)` says so and the page is seen. */
export function useAnswer(path, query = {}, { every = 0, again = () => true } = {}) {
  const [state, set] = useState({ value: null, error: null, asked: null });
  const asked = path + JSON.stringify(query);
  useEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    const look = async () => {
      try {
        const value = path && !document.hidden ? await ask(path, query, stop.signal) : null;
        if (value) set({ value, error: null, asked });
        if (every && (!value || again(value))) timer = setTimeout(look, every * 1000);
      } catch (error) {
        if (error.name === "AbortError") return;
        set((old) => ({ value: old.asked === asked ? old.value : null, error: error.message, asked }));
        if (every) timer = setTimeout(look, Math.max(2, every) * 1000);
      }
    };
    look();
    return () => { stop.abort(); clearTimeout(timer); };
  }, [asked, every]);
  return { ...state, fresh: state.asked === asked };
}

/** A value that follows what is typed after a pause. */
export function usePaused(value, milliseconds = 150) {
  const [seen, set] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => set(value), milliseconds);
    return () => clearTimeout(timer);
  }, [JSON.stringify(value)]);
  return seen;
}

// -- writing -------------------------------------------------------------------------------------------------------

const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);

export function number(value, digits = 3) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e12) return value.toExponential(2);  // 1e300 has 301 digits
  if (Number.isInteger(value)) return value.toLocaleString("en");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  if (size < 1e-3 && size > 0) return value.toExponential(1);
  return value.toPrecision(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

// Rounds as Python does, so that a figure is the same here and on the screen.
const rounded = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", {
  minimumFractionDigits: digits, maximumFractionDigits: digits, useGrouping: false, roundingMode: "halfEven",
}));
export const percent = (value, digits = 1) => (known(value) ? rounded[digits].format(100 * value) + "%" : "–");
export const signed = (value) => (known(value) ? (value > 0 ? "+" : "") + value.toFixed(2) : "–");

export function seconds(value) {
  if (!known(value)) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

export function ago(time) {
  const passed = Date.now() / 1000 - time;
  if (!known(time)) return "";
  if (passed < 90) return "just now";
  if (passed < 5400) return `${Math.round(passed / 60)} min ago`;
  return passed < 172800 ? `${Math.round(passed / 3600)} h ago` : `${Math.round(passed / 86400)} days ago`;
}

// Controls, marks of direction and of no width, and halves of surrogate pairs.
const UNSEEN = new RegExp(
  String.raw`[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff]|` +
    String.raw`[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]`,
  "g",
);

/** Text with the characters that show nothing, or turn the direction of writing, made visible. */
export function visible(text) {
  return String(text ?? "").replace(UNSEEN, (character) => {
    const code = character.charCodeAt(0);
    return code < 32 ? String.fromCharCode(0x2400 + code) : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

const FOLDED = 8000; // characters of a text that are shown at first

/** Written text: as text, however long and whatever is in it; `write` makes what is shown of it. */
export function Text({ text, kind = "", most = FOLDED, write = visible }) {
  const [all, show] = useState(false);
  const whole = String(text ?? "");
  const shown = all ? whole : whole.slice(0, most);
  return html`<pre class="text ${kind}" dir="auto" tabindex=${whole.length > 400 ? 0 : undefined}>${write(shown)}</pre>
    ${shown.length < whole.length && html`<button class="more" onClick=${() => show(true)}>
      show all ${number(whole.length)} characters</button>`}`;
}

/** Python with colours, as text nodes: Prism says what is what, nothing becomes HTML. */
export function Code({ text }) {
  const shown = visible(String(text ?? "").slice(0, 50000));
  const grammar = globalThis.Prism?.languages?.python;
  const parts = grammar && shown.length < 50000 ? Prism.tokenize(shown, grammar) : [shown];
  return html`<pre class="code" dir="ltr" tabindex="0">${parts.map(colored)}</pre>`;
}

function colored(part) {
  if (typeof part === "string") return part;
  const inner = Array.isArray(part.content) ? part.content.map(colored) : colored(part.content);
  return html`<span class="py-${part.type}">${inner}</span>`;
}

export const Problem = ({ error }) => error && html`<p class="problem" role="alert">${visible(error)}</p>`;

export const State = ({ state }) => state ? html`<span class="state ${state}">${state}</span>` : null;

const VERDICTS = { right: "✓ right", wrong: "✗ wrong", undecided: "? undecided" };

export const Verdict = ({ verdict }) =>
  html`<span class="verdict ${verdict || "none"}">${VERDICTS[verdict] || "– none"}</span>`;

/** A share with its 95% interval, as a bar and in figures; the bar first, so that bars of a column begin at one x. */
export function Figure({ figure, short = false }) {
  if (!figure || !known(figure.value)) return html`<span class="dim">–</span>`;
  const [low, high] = figure.interval || [figure.value, figure.value];
  const told = `${percent(low)}–${percent(high)}`;
  return html`<span class="figure" title=${short && figure.interval ? `95% interval ${told}` : undefined}>
    <svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">
      <rect width="100" height="8" class="bed" />
      <rect x=${100 * low} width=${Math.max(0.5, 100 * (high - low))} height="8" class="span" />
      <rect x=${100 * figure.value - 0.5} width="1.5" height="8" class="at" /></svg>
    ${percent(figure.value)} ${figure.interval && !short && html`<span class="dim">${told}</span>`}</span>`;
}

// -- what names mean -----------------------------------------------------------------------------------------------

let glossary = {}, asked = null;

/** { section: { name: [label, meaning] } }; empty until it is read, once for the page. */
export function useGlossary() {
  const [read, set] = useState(glossary);
  useEffect(() => {
    asked ??= fetch("glossary.json").then((answer) => answer.json()).then((found) => (glossary = found));
    asked.then(set, () => {});
  }, []);
  return read;
}

/** [label, meaning] of a name; `cpu/*` explains all that begin so. */
export function explained(terms, name) {
  const sections = Object.values(terms);
  const whole = sections.find((section) => section[name]);
  if (whole) return whole[name];
  const starts = ([key]) => key.endsWith("*") && name.startsWith(key.slice(0, -1));
  return sections.flatMap(Object.entries).find(starts)?.[1];
}

/** A name as people read it, with its meaning; a click leads to the glossary, unless `plain`, for what stands in each
 * row. */
export function Term({ name, label, plain = false }) {
  const found = explained(useGlossary(), name);
  const text = label ?? found?.[0] ?? name;
  if (!found) return visible(text);
  if (plain) return html`<span title=${found[1]}>${visible(text)}</span>`;
  return html`<a class="term" href=${link(["glossary"], { q: name })} title=${found[1]}>${visible(text)}</a>`;
}

export function useKeys(keys) {
  const held = useRef(keys);
  held.current = keys;
  useEffect(() => {
    const press = (event) => {
      const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
      if (typing && event.key === "Escape") event.target.blur();
      if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
      const act = held.current[event.key];
      if (act) { event.preventDefault(); act(); }
    };
    addEventListener("keydown", press);
    return () => removeEventListener("keydown", press);
  }, []);
}

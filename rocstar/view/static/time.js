// Where the wall time of a run went: a bar for each step, or the mean of neighbouring steps, and sums of each stage.

import { amend, html, link, number, ofRun, percent, place, Problem, seconds, useAnswer, visible } from "./lib.js";

const PARTS = {
  engine: "attempts: engines", tool: "attempts: tools", learn: "learning", both: "learning beside attempts",
  evaluation: "evaluation", saving: "checkpoints", start: "setting up, records", rest: "idle and other",
};
const PHASES = ["rollout", "learning", "sft", "record", "evaluation", "saving", "pool", "cold start"];
const OF_STEPS = ["step/seconds", "step/overlap_seconds", "tool/seconds_share"];
const METRICS = [...OF_STEPS, ...PHASES.map((one) => `seconds/${one}`)].join();
const MOST_BARS = 240;

/** Seconds of a row by PARTS. Of the time that a step waits for attempts, tools have their share of the attempts' own
 * time. What lies before a step (evaluation, checkpoint, pool) is no part of step/seconds. */
function partsOf(columns, at) {
  const of = (name) => columns[name]?.[at] ?? 0;
  const [rollout, learning, sft, record, evaluation, saving, pool, cold] = PHASES.map((one) => of(`seconds/${one}`));
  const tool = rollout * of("tool/seconds_share"), both = Math.min(learning, of("step/overlap_seconds"));
  const rest = Math.max(0, of("step/seconds") - rollout - learning - sft - record);
  const start = record + pool + cold;
  return { engine: rollout - tool, tool, learn: learning - both + sft, both, evaluation, saving, start, rest };
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const each = (made) => Object.fromEntries(Object.keys(PARTS).map((part) => [part, made(part)]));
const summed = (rows) => each((part) => sum(rows.map((row) => row[part])));
const told = (row) => Object.keys(PARTS).filter((part) => row[part] > 0)
  .map((part) => `${PARTS[part]} ${seconds(row[part])}`).join(", ");

export function Time({ name, run }) {
  const { query } = place();
  const live = { every: 3, again: () => run.state === "running" };
  const { value, error } = useAnswer(ofRun(name, "curves"), { metrics: METRICS }, live);
  if (!value) return html`<${Problem} error=${error} />`;
  const all = value.axes.step.map((step, at) => ({ step, ...partsOf(value.columns, at) }));
  if (!all.length) return html`<p class="dim empty">no step is done yet</p>`;
  const rows = within(all, query.steps);
  const phases = PHASES.some((one) => value.columns[`seconds/${one}`].some((found) => found !== null));
  const stages = value.spans.map(({ name: stage, first, last }) => ({ stage, steps: `${first}..${last}` }));
  return html`<div class="bar filters"><label>steps
      ${" "}<input class="range" placeholder="5..90" value=${query.steps || ""}
        onChange=${(e) => amend({ steps: e.target.value.trim() })} /></label>
      ${stages.map(({ stage, steps }) => html`<a class="chip" aria-current=${query.steps === steps}
        href=${link(["run", name, "time"], { steps: query.steps === steps ? "" : steps })}>${visible(stage)}</a>`)}
      ${query.steps && html`<button onClick=${() => amend({ steps: "" })}>all steps</button>`}</div>
    ${!phases && html`<p class="problem">this run was made by a version that did not record the time of phases;
      only whole steps are known</p>`}
    ${rows.length ? html`<${Bars} name=${name} rows=${rows} />` : html`<p class="dim empty">no step is within</p>`}
    <table class="plain"><thead><tr><th>stage</th><th>steps</th><th>time</th>
      ${Object.entries(PARTS).map(([part, label]) => html`<th><span class="key ${part}">${label}</span></th>`)}
    </tr></thead><tbody>${stages.map(({ stage, steps }) => html`<${Sums} label=${stage} rows=${within(all, steps)} />`)}
      <${Sums} label=${rows.length < all.length ? "these steps" : "all"} rows=${rows} /></tbody></table>`;
}

/** Rows of the steps `5..9`, `5..`, `..9`, `5`; all of them where the text says nothing. */
function within(rows, text = "") {
  const [low, high] = text.includes("..") ? text.split("..") : [text, text];
  return rows.filter(({ step }) => step >= (Number(low) || 0) && step <= (Number(high) || Infinity));
}

function Sums({ label, rows }) {
  const row = summed(rows), whole = sum(Object.values(row));
  return html`<tr><td data-label="stage">${visible(label)}</td><td data-label="steps">${number(rows.length)}</td>
    <td data-label="time"><b>${seconds(whole)}</b></td>${Object.entries(PARTS).map(([part, what]) => html`
      <td data-label=${what}>${row[part] > 0 ? html`${seconds(row[part])}${" "}
        <span class="dim">${percent(row[part] / whole, 0)}</span>` : ""}</td>`)}</tr>`;
}

function Bars({ name, rows }) {
  const size = Math.ceil(rows.length / MOST_BARS);
  const bars = Array.from({ length: Math.ceil(rows.length / size) }, (_, at) => {
    const some = rows.slice(at * size, (at + 1) * size), sums = summed(some);
    const mean = each((part) => sums[part] / some.length);
    return { first: some[0].step, last: some.at(-1).step, mean, tall: sum(Object.values(mean)) };
  });
  const most = Math.max(...bars.map(({ tall }) => tall)) || 1;
  const bar = ({ first, last, mean, tall }, at) => {
    let top = most;
    const address = first === last ? link(["run", name, "attempts"], { step: first })
      : link(["run", name, "time"], { steps: `${first}..${last}` });
    return html`<a href=${address}><title>${`step ${number(first)}${last > first ? ` to ${number(last)}, each` : ""}: `
      + `${seconds(tall)} = ${told(mean)}`}</title>${Object.keys(PARTS).map((part) => mean[part] > 0 && html`
      <rect class=${part} x=${at} width="0.9" y=${top -= mean[part]} height=${mean[part]} />`)}</a>`;
  };
  return html`<figure class="of-steps"><figcaption class="dim">
      ${seconds(most)}${size > 1 && ` (means of ${size} steps)`}</figcaption>
      <svg viewBox="0 0 ${bars.length} ${most}" preserveAspectRatio="none" role="group"
      aria-label=${`Time of steps: ${told(summed(rows))}`}>${bars.map(bar)}</svg>
    <figcaption class="dim"><span>step ${number(rows[0].step)}</span>
      <span>${number(rows.at(-1).step)}</span></figcaption></figure>`;
}

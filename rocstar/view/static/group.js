// A group: the siblings of a problem side by side, what was kept and why, and what other settings would have kept.

import {
  amend, html, link, number, ofRun, percent, place, Problem, seconds, signed, Term, Text, useAnswer, usePaused, Verdict,
  visible,
} from "./lib.js";
import { withMath } from "./math.js";
import { ofOthers, Tabs } from "./run.js";

const METHODS = { roc: "RoC, the paper's draw", roc_release: "RoC as released", uniform: "uniform", all: "keep all" };
const WHATIF = [
  "method", "keep", "min_positive", "min_negative", "repetition_weight", "failure_floor", "drop_truncated",
  "drop_void_turns", "weight_errors", "format_weight", "format_penalty",
];

export const placed = (at) => {
  const parts = (at || "").split(":");
  const [step, third] = parts.splice(-2);
  return { part: parts.join(":"), step, third };
};

export function Group({ name }) {
  const { query } = place();
  const { part, step, third: grp } = placed(query.at);
  const { value, error } = useAnswer(ofRun(name, "group"), { part, step, grp });
  if (!value) return html`<${Tabs} name=${name} tab="groups" /><${Problem} error=${error} />`;
  const { problem, siblings } = value;
  return html`<${Tabs} name=${name} tab="groups" />
    <div class="bar"><h1>${part.startsWith("rollouts") ? `step ${number(+step)}` : visible(part)}</h1>
      <span class="dim">problem ${visible(problem.problem_id.slice(0, 12))}</span>
      <a class="button" href=${link(["run", name, "groups"], { problem: problem.problem_id, sort: "step" })}>
        its groups over steps</a>
      <a class="button" href=${link(["run", name, "attempts"], { problem: problem.problem_id })}>
        all its attempts</a></div>
    <section class="card"><${Text} text=${problem.question} kind="question" write=${withMath} />
      <p>right answer <b class="answer">${visible(problem.gold)}</b></p></section>
    <${Siblings} name=${name} query=${query} part=${part} step=${step} grp=${grp} rows=${siblings} />`;
}

function Siblings({ name, query, part, step, grp, rows }) {
  const asked = Object.fromEntries(WHATIF.map((key) => [key, query["w." + key]]));
  const trained = part === "rollouts" && !ofOthers(name);
  const whatIf = useAnswer(trained ? ofRun(name, "what-if") : "", usePaused({ part, step, grp, ...asked }, 120));
  const tried = Object.values(asked).some(Boolean);
  const found = whatIf.value;
  const changed = found && tried ? found.siblings.filter((one, at) => one.kept !== rows[at].kept).length : null;
  const place = [...rows.keys()].sort((a, b) => order(rows[a], rows[b]) || a - b);
  const head = (names) => names.map((one) => html`<th>${one}</th>`);
  return html`${trained && html`<${Funnel} rows=${rows} found=${found} />`}
    ${trained && html`<${WhatIf} used=${found?.used} query=${query} tried=${tried} changed=${changed}
      error=${whatIf.error} />`}
    <div class="wide"><table class="siblings"><thead><tr>${head(["#", "verdict"])}
      ${trained && html`<th><${Term} name="penalty" /> <span class="key errors"><${Term} name="penalty_errors"
          label="calls" /></span> <span class="key format"><${Term} name="penalty_format" label="form" /></span></th>
        <th><${Term} name="chance" /></th><th><${Term} name="fate" /></th><th><${Term} name="advantage" /></th>`}
      ${tried && ["what if: chance", "fate", "advantage"].map((one) => html`<th class="tried">${one}</th>`)}
      ${head(["turns", "calls", "tokens", "time", "answer", "errors and end"])}</tr></thead>
    <tbody>${place.map((at) => html`<${Sibling} key=${at} name=${name} row=${rows[at]} trained=${trained} tried=${tried}
      now=${found?.siblings[at]} chance=${found?.chances[at]} />`)}</tbody></table></div>`;
}

/** Kept ones first, then those with more reward, then those with less penalty. */
function order(a, b) {
  return b.kept - a.kept || (b.reward ?? -1) - (a.reward ?? -1) || (a.penalty_total ?? 9) - (b.penalty_total ?? 9);
}

/** How many were drawn, right, and kept, and by which settings. */
function Funnel({ rows, found }) {
  const of = (verdict) => rows.filter((row) => row.verdict === verdict);
  const right = of("right"), wrong = of("wrong"), rest = rows.length - right.length - wrong.length;
  const kept = (some) => some.filter((row) => row.kept).length;
  const same = found?.recomputed.every((one, at) => one.kept === rows[at].kept && one.reason === rows[at].reason);
  return html`<section class="card funnel"><b>${rows.length} drawn</b>
    <span>→ <span class="verdict right">${right.length} right</span> → ${kept(right)} kept</span>
    <span>→ <span class="verdict wrong">${wrong.length} wrong</span> → ${kept(wrong)} kept</span>
    ${rest > 0 && html`<span>${rest} without a verdict</span>`}
    ${found && html`<details><summary class="dim">by ${METHODS[found.used.method]}, G = ${found.used.keep}
        ${arithmetic(found.used, right.length, wrong.length)}</summary><dl class="used">
        ${Object.entries(found.used).map(([key, one]) => html`
          <dt>resample.${key}</dt><dd>${visible(JSON.stringify(one))}</dd>`)}
      </dl></details>
      ${same ? html`<span class="good">✓ recomputed with the run's seed: the same choice, all ${rows.length}</span>`
        : html`<span class="warn">▲ recomputed with the run's seed: another choice than the recorded one</span>`}`}
  </section>`;
}

function arithmetic({ method, keep, failure_floor }, right, wrong) {
  const n = right + wrong;
  if (!right || !wrong || n <= keep) return "";
  if (method === "roc") {
    const failures = Math.max(Math.floor((wrong * keep) / n), Math.min(failure_floor, wrong));
    return `: wrong ⌊${wrong}·${keep}/${n}⌋ = ${failures}, right ${keep} − ${failures} = ${keep - failures}`;
  }
  return method === "roc_release" ? `: wrong ≈ ${wrong}·${keep}/${n}, right ≈ ${right}·${keep}/${n}` : "";
}

function Sibling({ name, row, trained, now, chance, tried }) {
  const changed = tried && now && now.kept !== row.kept;
  const address = link(["run", name, "attempt"], { at: `${row.part}:${row.step}:${row.row}` });
  const fate = (one) => html`<span class="fate ${one?.kept ? "kept" : ""}">
    ${one?.reason ? html`<${Term} name=${one.reason} plain />` : one ? "–" : "…"}</span>`;
  const end = row.stop === "answered" ? visible(row.preview?.slice(-60)) : row.stop;
  return html`<tr class="${row.kept ? "kept" : "dropped"} ${changed ? "changed" : ""}">
    <td data-label="sibling"><a class="open" href=${address}>${row.sibling}</a></td>
    <td data-label="verdict"><${Verdict} verdict=${row.verdict} /></td>
    ${trained && html`<td data-label="penalty"><${Penalty} row=${row} /></td>
      <td data-label="chance kept">${chance === undefined ? html`<span class="dim">…</span>` : percent(chance, 0)}</td>
      <td data-label="fate">${fate(row)}</td><td data-label="advantage">${signed(row.advantage)}</td>`}
    ${tried && html`<td class="tried" data-label="what if: chance">${now ? percent(now.chance, 0) : "…"}</td>
      <td class="tried" data-label="what if: fate">${fate(now)}</td>
      <td class="tried" data-label="what if: advantage">${signed(now?.advantage)}</td>`}
    <td data-label="turns">${row.turns}</td>
    <td data-label="calls">${row.calls}
      ${row.failed_calls > 0 && html` <span class="warn">${row.failed_calls}✗</span>`}</td>
    <td data-label="tokens">${number(row.tokens)}</td><td data-label="time">${seconds(row.seconds)}</td>
    <td data-label="answer" class="cut">${visible(row.extracted ?? "–")}</td>
    <td data-label="end" class="cut">${row.errors.length > 0 && html`
      <span class="warn">${visible(row.errors.join(", "))}</span> `}<span class="dim">${end}</span></td></tr>`;
}

function Penalty({ row }) {
  const width = (value) => ({ width: 50 * (value ?? 0) + "%" });
  const told = `calls ${number(row.penalty_errors)}, form ${number(row.penalty_format)}`;
  return html`<span class="penalty"><span class="stack" role="img" aria-label=${told} title=${told}>
      <i class="errors" style=${width(row.penalty_errors)}></i><i class="format" style=${width(row.penalty_format)}></i>
    </span>${number(row.penalty_total)}</span>`;
}

function WhatIf({ used, query, tried, changed, error }) {
  const change = (key, value) => amend({ ["w." + key]: value }, { keep: false });
  const typed = (key) => (e) => change(key, e.target.value);
  const now = (key) => query["w." + key] ?? used?.[key] ?? "";
  const method = now("method");
  const field = (key, label, step, low, high, value = now(key)) => html`<label>${label}
    ${" "}<input type="number" class="range" step=${step} min=${low} max=${high} value=${value} onInput=${typed(key)} />
  </label>`;
  const tick = (key, label) => html`<label><input type="checkbox" checked=${String(now(key)) === "true"}
    onChange=${(e) => change(key, String(e.target.checked))} /> ${label}</label>`;
  const asItWas = () => amend(Object.fromEntries(WHATIF.map((key) => ["w." + key, ""])));
  const told = changed !== null ? html` <b class="count">${changed} fates change</b>` : "";
  return html`<details class="card what-if" open=${tried || undefined}><summary><b>What if</b>
      <span class="dim"> training had chosen otherwise? The same functions answer${told ? "" : " at once"}.</span>
      ${told}</summary>
    <div class="bar filters"><label>resampler <select value=${method} onChange=${typed("method")}>
        ${Object.entries(METHODS).map(([id, label]) => html`<option value=${id}>${label}</option>`)}</select></label>
      ${method !== "all" && field("keep", "keep G", 1, 2, 1024)}
      ${method === "roc_release" && field("min_positive", "at least right", 1, 0, 64)}
      ${method === "roc_release" && field("min_negative", "at least wrong", 1, 0, 64)}
      ${method === "roc" && field("failure_floor", "at least wrong", 1, 0, 64)}
      ${field("weight_errors", "weight of failed calls", 0.1, 0, 100, query["w.weight_errors"] ?? 1)}
      ${field("format_weight", "weight of form", 0.1, 0, 100)}
      <label>form counts <select value=${now("format_penalty")} onChange=${typed("format_penalty")}>
        <option value="asked">where the prompt asks for it</option><option value="always">always</option>
      </select></label>
      ${field("repetition_weight", "weight of repetition", 0.1, 0, 100)}
      ${tick("drop_truncated", "leave out cut attempts")} ${tick("drop_void_turns", "leave out void turns")}
      ${tried && html`<button onClick=${asItWas}>as it was</button>`}</div><${Problem} error=${error} /></details>`;
}

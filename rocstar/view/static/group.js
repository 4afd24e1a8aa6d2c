// A group: the siblings of a problem side by side, what was kept and why, and what other settings would have kept.

import { amend, html, link, number, ofRun, percent, place, Problem, seconds, signed, Text, useAnswer, usePaused, Verdict, visible } from "./lib.js";
import { Tabs } from "./run.js";

const METHODS = { roc: "RoC, the paper's draw", roc_release: "RoC as released", uniform: "uniform", all: "keep all" };
const WHATIF = ["method", "keep", "min_positive", "min_negative", "repetition_weight", "failure_floor", "drop_truncated", "weight_errors", "format_weight", "format_penalty"];

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
  return html`<${Tabs} name=${name} tab="groups" />
    <div class="bar"><h1>${part === "rollouts" ? `step ${number(+step)}` : visible(part)}</h1><span class="dim">problem ${visible(value.problem.problem_id.slice(0, 12))}</span>
      <a class="button" href=${link(["run", name, "attempts"], { problem: value.problem.problem_id })}>all its attempts</a></div>
    <section class="card"><${Text} text=${value.problem.question} kind="question" /><p>right answer <b class="answer">${visible(value.problem.gold)}</b></p><${History} name=${name} history=${value.history} at=${query.at} /></section>
    <${Siblings} name=${name} query=${query} part=${part} step=${step} grp=${grp} rows=${value.siblings} />`;
}

function History({ name, history, at }) {
  if (history.length < 2) return null;
  return html`<div class="history"><span class="dim">this problem before and after</span>${history.slice(-40).map((one) =>
    html`<a href=${link(["run", name, "group"], { at: `${one.part}:${one.step}:${one.grp}` })} aria-current=${at === `${one.part}:${one.step}:${one.grp}` ? "page" : undefined} title=${`${one.part} at step ${one.step}: ${percent(one.share, 0)} of ${one.attempts} right`}>
      <span class="sr">step ${one.step}, ${percent(one.share, 0)} right</span><i style=${{ height: 3 + 25 * one.share + "px" }}></i></a>`)}</div>`;
}

function Siblings({ name, query, part, step, grp, rows }) {
  const asked = Object.fromEntries(WHATIF.map((key) => [key, query["w." + key]]));
  const trained = part === "rollouts";
  const whatIf = useAnswer(trained ? ofRun(name, "what-if") : "", usePaused({ part, step, grp, ...asked }, 120));
  const tried = Object.values(asked).some(Boolean);
  const found = whatIf.value;
  const right = rows.filter(({ verdict }) => verdict === "right").length;
  const wrong = rows.filter(({ verdict }) => verdict === "wrong").length;
  const kept = (verdict) => rows.filter((row) => row.kept && row.verdict === verdict).length;
  const order = [...rows.keys()].sort((a, b) => rows[b].kept - rows[a].kept || (rows[b].reward ?? -1) - (rows[a].reward ?? -1) || (rows[a].penalty_total ?? 9) - (rows[b].penalty_total ?? 9) || a - b);
  return html`${trained && html`<section class="card funnel"><b>${rows.length} drawn</b>
      <span>→ <span class="verdict right">${right} right</span> → ${kept("right")} kept</span><span>→ <span class="verdict wrong">${wrong} wrong</span> → ${kept("wrong")} kept</span>
      ${rows.length - right - wrong > 0 && html`<span>${rows.length - right - wrong} without a verdict</span>`}
      ${found && html`<span class="dim">by ${METHODS[found.used.method]}, G = ${found.used.keep}${arithmetic(found.used, right, wrong)}</span>
        ${found.recomputed.every((one, at) => one.kept === rows[at].kept && one.reason === rows[at].reason)
          ? html`<span class="good">✓ recomputed with the run's seed: the same choice, all ${rows.length}</span>`
          : html`<span class="warn">▲ recomputed with the run's seed: another choice than the recorded one</span>`}`}</section>`}
    ${trained && html`<${WhatIf} used=${found?.used} query=${query} tried=${tried} changed=${found && tried ? found.siblings.filter((one, at) => one.kept !== rows[at].kept).length : null} error=${whatIf.error} />`}
    <div class="wide"><table class="siblings"><thead><tr><th>#</th><th>verdict</th>${trained && html`<th>penalty <span class="key errors">calls</span> <span class="key format">form</span></th><th>chance kept</th><th>fate</th><th>advantage</th>`}
      ${tried && html`<th class="tried">what if: chance</th><th class="tried">fate</th><th class="tried">advantage</th>`}<th>turns</th><th>calls</th><th>tokens</th><th>time</th><th>answer</th><th>errors and end</th></tr></thead>
    <tbody>${order.map((at) => html`<${Sibling} key=${at} name=${name} row=${rows[at]} trained=${trained} now=${found?.siblings[at]} chance=${found?.chances[at]} tried=${tried} />`)}</tbody></table></div>`;
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
  return html`<tr class="${row.kept ? "kept" : "dropped"} ${changed ? "changed" : ""}"><td data-label="sibling"><a class="open" href=${address}>${row.sibling}</a></td><td data-label="verdict"><${Verdict} verdict=${row.verdict} /></td>
    ${trained && html`<td data-label="penalty"><${Penalty} row=${row} /></td><td data-label="chance kept">${chance === undefined ? html`<span class="dim">…</span>` : percent(chance, 0)}</td>
      <td data-label="fate"><span class="fate ${row.kept ? "kept" : ""}">${row.reason || "–"}</span></td><td data-label="advantage">${signed(row.advantage)}</td>`}
    ${tried && html`<td class="tried" data-label="what if: chance">${now ? percent(now.chance, 0) : "…"}</td><td class="tried" data-label="what if: fate"><span class="fate ${now?.kept ? "kept" : ""}">${now?.reason || "…"}</span></td><td class="tried" data-label="what if: advantage">${signed(now?.advantage)}</td>`}
    <td data-label="turns">${row.turns}</td><td data-label="calls">${row.calls}${row.failed_calls > 0 && html` <span class="warn">${row.failed_calls}✗</span>`}</td><td data-label="tokens">${number(row.tokens)}</td><td data-label="time">${seconds(row.seconds)}</td>
    <td data-label="answer" class="cut">${visible(row.extracted ?? "–")}</td><td data-label="end" class="cut">${row.errors.length > 0 && html`<span class="warn">${visible(row.errors.join(", "))}</span> `}<span class="dim">${row.stop === "answered" ? visible(row.preview?.slice(-60)) : row.stop}</span></td></tr>`;
}

function Penalty({ row }) {
  const width = (value) => ({ width: 50 * (value ?? 0) + "%" });
  return html`<span class="penalty"><span class="stack" role="img" aria-label=${`calls ${number(row.penalty_errors)}, form ${number(row.penalty_format)}`}><i class="errors" style=${width(row.penalty_errors)}></i><i class="format" style=${width(row.penalty_format)}></i></span>${number(row.penalty_total)}</span>`;
}

function WhatIf({ used, query, tried, changed, error }) {
  const set = (key) => (e) => amend({ ["w." + key]: e.target.type === "checkbox" ? (e.target.checked ? "true" : "false") : e.target.value }, { keep: false });
  const now = (key) => query["w." + key] ?? used?.[key] ?? "";
  const method = now("method");
  const field = (key, label, step, low, high) => html`<label>${label} <input type="number" class="range" step=${step} min=${low} max=${high} value=${now(key)} onInput=${set(key)} /></label>`;
  return html`<details class="card what-if" open=${tried || undefined}><summary><b>What if</b> <span class="dim">training had chosen otherwise? The same functions answer${changed !== null ? "" : " at once"}.</span>${changed !== null && html` <b class="count">${changed} fates change</b>`}</summary>
    <div class="bar filters"><label>resampler <select value=${method} onChange=${set("method")}>${Object.entries(METHODS).map(([id, label]) => html`<option value=${id}>${label}</option>`)}</select></label>
      ${method !== "all" && field("keep", "keep G", 1, 2, 1024)}${method === "roc_release" && [field("min_positive", "at least right", 1, 0, 64), field("min_negative", "at least wrong", 1, 0, 64)]}${method === "roc" && field("failure_floor", "at least wrong", 1, 0, 64)}
      <label>weight of failed calls <input type="number" class="range" step="0.1" min="0" max="100" value=${query["w.weight_errors"] ?? 1} onInput=${set("weight_errors")} /></label>
      ${field("format_weight", "weight of form", 0.1, 0, 100)}
      <label>form counts <select value=${now("format_penalty")} onChange=${set("format_penalty")}><option value="asked">where the prompt asks for it</option><option value="always">always</option></select></label>
      ${field("repetition_weight", "weight of repetition", 0.1, 0, 100)}
      <label><input type="checkbox" checked=${String(now("drop_truncated")) === "true"} onChange=${set("drop_truncated")} /> leave out cut attempts</label>
      ${tried && html`<button onClick=${() => amend(Object.fromEntries(WHATIF.map((key) => ["w." + key, ""])))}>as it was</button>`}</div><${Problem} error=${error} /></details>`;
}

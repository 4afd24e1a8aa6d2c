// The page: which view the address asks for, the bar above all of them, and the keys.

import { AttemptPage } from "./attempt.js";
import { Attempts, Groups } from "./attempts.js";
import { Evaluation } from "./evaluation.js";
import { Glossary } from "./glossary.js";
import { Group } from "./group.js";
import { ask, html, link, place, render, useEffect, useErrorBoundary, useKeys, useState, visible } from "./lib.js";
import { walk } from "./list.js";
import { Run } from "./run.js";
import { Runs } from "./runs.js";

const KEYS = [
  ["j / k", "next or previous row"], ["Enter", "open it"], ["/", "search"], ["n / p", "next or previous sibling"],
  ["g", "its group"], ["c", "colour tokens by the next number"], ["[ / ]", "previous or next strong token"],
  ["u", "up"], ["y", "copy the address"], ["d", "dark or light"], ["?", "these keys"],
];

function App() {
  const [, turn] = useState(0);
  const [help, showHelp] = useState(false);
  const [broken, mend] = useErrorBoundary();
  const { parts, query } = place();
  useEffect(() => {
    const changed = () => { mend(); turn((n) => n + 1); };
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  useEffect(() => { document.title = ["rocstar", ...parts.slice(1)].join(" · "); });
  useKeys({
    j: () => walk(1), k: () => walk(-1), "/": () => document.getElementById("search")?.focus(),
    "?": () => showHelp(!help), Escape: () => showHelp(false), d: theme,
    y: () => navigator.clipboard?.writeText(location.href), u: () => (location.hash = upward(parts, query)),
  });
  const skip = (e) => { e.preventDefault(); document.getElementById("main").focus(); };
  return html`<a class="skip" href="#main" onClick=${skip}>to the content</a>
    <header><a class="brand" href="#/"><img src="icon.svg" alt="" width="20" height="20" /> rocstar</a>
      ${parts[1] && html`<span class="dim">/</span><a href=${owner(parts)}>${visible(parts[1])}</a>`}
      <span class="gap"></span><a class="button" href="#/glossary">glossary</a>
      <button aria-label="dark or light" onClick=${theme}>◐</button>
      <button aria-label="keys" aria-expanded=${help} onClick=${() => showHelp(!help)}>?</button></header>
    <main id="main" tabindex="-1">${broken ? html`<p class="problem" role="alert">
      this view failed: ${visible(broken.message)}; the address names it, please report it</p>` : view(parts)}</main>
    ${help && html`<aside class="help" role="dialog" aria-label="Keys"><h2>Keys</h2>
      <dl>${KEYS.map(([key, what]) => html`<dt><kbd>${key}</kbd></dt><dd>${what}</dd>`)}</dl></aside>`}`;
}

/** Where the name in the bar leads. */
function owner([kind, name]) {
  return kind === "eval" && name.includes(":") ? "#/" : link(["run", name]);
}

function view([kind, name, what, step]) {
  if (kind === "glossary") return html`<${Glossary} />`;
  if (kind === "eval" && name)
    return html`<${Evaluation} key=${[name, what, step].join()} name=${name} part=${what} step=${step} />`;
  if (kind && !["run", "eval"].includes(kind)) return html`<p class="problem" role="alert">there is no page
    ${" "}${visible(kind)} here; <a href="#/">the list of runs</a> leads to all there are</p>`;
  if (kind !== "run" || !name) return html`<${Runs} />`;
  const one = { attempts: Attempts, groups: Groups, group: Group, attempt: AttemptPage }[what];
  if (!one) return html`<${Run} key=${name} name=${name} tab=${what || "curves"} />`;
  // Another group begins anew: rows of one beside the choice of another would look like a wrong choice.
  return html`<${one} key=${[name, one === Group && place().query.at].join()} name=${name} />`;
}

function upward([kind, name, what], query) {
  if (kind === "eval") return link(["run", name, "evaluations"]);
  if (what === "attempt") return link(["run", name, "attempts"], { ...query, at: "", with: "", colour: "", part: "" });
  if (what === "group") return link(["run", name, "groups"]);
  return what ? link(["run", name]) : "#/";
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", root.dataset.theme); } catch { /* not kept, then */ }
  dispatchEvent(new HashChangeEvent("hashchange"));
}

async function start() {
  try {
    const kept = localStorage.getItem("theme");
    if (kept) document.documentElement.dataset.theme = kept;
  } catch { /* none kept */ }
  if (!location.hash) {
    const { first } = await ask("sources").catch(() => ({ first: "/" }));
    history.replaceState(null, "", "#" + first);
  }
  render(html`<${App} />`, document.getElementById("app"));
}

start();

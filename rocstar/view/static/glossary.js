// What the names of metrics, of figures and of fates mean.

import { amend, explained, html, place, useGlossary, visible } from "./lib.js";

export function Glossary() {
  const terms = useGlossary();
  const { q = "" } = place().query;
  const words = q.toLowerCase().split(/\s+/).filter(Boolean);
  const fits = (entry) => words.every((word) => entry.flat().join(" ").toLowerCase().includes(word));
  const exact = explained(terms, q);
  const sections = Object.entries(terms)
    .map(([title, section]) => [title, Object.entries(section).filter((entry) => entry[1] === exact || fits(entry))])
    .filter(([, entries]) => entries.length);
  return html`<div class="bar filters"><h1>Glossary</h1>
      <input type="search" id="search" aria-label="Terms that have" placeholder="name or meaning …  /" value=${q}
        onInput=${(e) => amend({ q: e.target.value }, { keep: false })} /></div>
    ${sections.map(([title, entries]) => html`<h2>${title}</h2><dl class="glossary">${entries.map(Entry)}</dl>`)}
    ${!sections.length && html`<p class="dim empty">nothing of that name is explained</p>`}`;
}

const Entry = ([name, [label, meaning]]) =>
  html`<dt>${visible(label)} ${label !== name && html`<code>${visible(name)}</code>`}</dt><dd>${visible(meaning)}</dd>`;

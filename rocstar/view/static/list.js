// A list of any length: only the rows in view exist, pages of them are asked for as they come into view.

import { ask, html, Problem, useEffect, useRef, useState } from "./lib.js";

const PAGE = 100;
const TALLEST = 8_000_000; // pixels of a scrolled box; browsers end between 17 and 33 million

/** `columns`: [{ name, label, sort, cell(row), wide }]. `onAbout` hears what the answer says beside its rows. */
export function List({ path, query, columns, href, sort, onSort, onAbout, label, height = 34, narrow = 62 }) {
  const box = useRef(null);
  const [pages, setPages] = useState({});
  const [total, setTotal] = useState(null);
  const [reading, setReading] = useState(false);
  const [error, setError] = useState(null);
  const [view, setView] = useState({ top: 0, tall: 600, small: false });
  const asked = path + JSON.stringify(query) + sort;
  const rowHeight = view.small ? narrow : height;

  useEffect(() => {
    const look = () => {
      const { scrollTop: top, clientHeight: tall } = box.current || {};
      if (box.current) setView({ top, tall, small: innerWidth < 700 });
    };
    look();
    const watcher = new ResizeObserver(look);
    watcher.observe(box.current);
    box.current.addEventListener("scroll", look, { passive: true });
    return () => watcher.disconnect();
  }, []);

  const rows = total ?? 0;
  const full = rows * rowHeight;
  const drawn = Math.min(full, TALLEST);
  const scale = full > drawn ? (full - view.tall) / (drawn - view.tall) : 1;
  const first = Math.max(0, Math.floor((view.top * scale) / rowHeight) - 3);
  const last = Math.min(rows, first + Math.ceil(view.tall / rowHeight) + 7);
  const wanted = [...new Set([Math.floor(first / PAGE), Math.floor(Math.max(first, last - 1) / PAGE)])];

  // The first page again while a table or a search is not done, or a run is being written.
  useEffect(() => {
    const stop = new AbortController();
    let timer = 0;
    const fetchFirst = async () => {
      try {
        const found = await ask(path, { ...query, sort, offset: 0, limit: PAGE }, stop.signal);
        setError(null);
        setTotal(found.total);
        setReading(found.indexing > 0 || found.searched < found.of);
        setPages((old) => (old.asked === asked ? { ...old, 0: found.rows } : { asked, 0: found.rows }));
        onAbout?.(found);
        const busy = found.indexing > 0 || (found.of ?? 0) > (found.searched ?? 0);
        timer = setTimeout(fetchFirst, busy ? 400 : 5000);
      } catch (failure) {
        if (failure.name !== "AbortError") setError(failure.message);
      }
    };
    if (box.current) box.current.scrollTop = 0;
    fetchFirst();
    return () => { stop.abort(); clearTimeout(timer); };
  }, [asked]);

  useEffect(() => {
    const missing = wanted.filter((page) => page > 0 && !(pages.asked === asked && pages[page]));
    if (!missing.length) return;
    const stop = new AbortController();
    const timer = setTimeout(() => {
      for (const page of missing)
        ask(path, { ...query, sort, offset: page * PAGE, limit: PAGE }, stop.signal)
          .then((found) => setPages((old) => (old.asked === asked ? { ...old, [page]: found.rows } : old)))
          .catch((failure) => failure.name !== "AbortError" && setError(failure.message));
    }, 60);
    return () => { stop.abort(); clearTimeout(timer); };
  }, [asked, wanted.join()]);

  const at = (place) => (pages.asked === asked ? pages[Math.floor(place / PAGE)]?.[place % PAGE] : undefined);
  const scrolled = Math.min(view.top, drawn - view.tall) - ((view.top * scale) % rowHeight) - 3 * rowHeight;
  const shift = scale === 1 ? first * rowHeight : scrolled;
  const shown = Array.from({ length: Math.max(0, last - first) }, (_, place) => first + place);
  return html`<${Problem} error=${error} />
    <div class="list" role="table" aria-label=${label} aria-rowcount=${rows}>
      <div role="rowgroup"><div class="head" role="row">
        ${columns.map((column) => html`<${Head} column=${column} sort=${sort} onSort=${onSort} />`)}</div></div>
      <div class="scroll" ref=${box} tabindex="0" role="rowgroup">
        <div class="ghost" role="presentation" style=${{ height: drawn + "px" }}>
          <div class="rows" role="presentation" style=${{ transform: `translateY(${Math.max(0, shift)}px)` }}>
            ${shown.map((place) => html`
              <${Row} key=${place} row=${at(place)} columns=${columns} href=${href} tall=${rowHeight} />`)}
          </div>
        </div>
      </div>
    </div>
    ${total === 0 && html`<p class="dim empty">
      ${reading ? "nothing yet; more files are being read" : "nothing matches"}</p>`}`;
}

function Head({ column, sort, onSort }) {
  const way = sort === column.sort ? "ascending" : sort === "-" + column.sort ? "descending" : undefined;
  const flip = () => onSort(way === "descending" ? column.sort : "-" + column.sort);
  const text = `${column.label}${{ ascending: " ↑", descending: " ↓" }[way] ?? ""}`;
  return html`<span role="columnheader" class="c-${column.name}" aria-sort=${way}>
    ${column.sort ? html`<button onClick=${flip}>${text}</button>` : text}
  </span>`;
}

function Row({ row, columns, href, tall }) {
  const cell = (column, place) => (place ? column.cell(row)
    : html`<a class="open" href=${href(row)}>${column.cell(row)}</a>`);
  return html`<div class="row" role="row" style=${{ height: tall + "px" }}>
    ${!row && html`<span role="cell" class="dim">…</span>`}
    ${row && columns.map((column, place) => html`
      <span role="cell" class="c-${column.name}">${cell(column, place)}</span>`)}
  </div>`;
}

/** j and k walk through the rows. */
export function walk(by) {
  const rows = [...document.querySelectorAll("a.open")];
  const next = rows[Math.max(0, Math.min(rows.length - 1, rows.indexOf(document.activeElement) + by))];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

// LaTeX in what was written, as MathML: Temml reads it, and only the elements and attributes named here are made of it.
// What it cannot read stays as it was written.

import { html, place, useLayoutEffect, useMemo, useRef, visible } from "./lib.js";

const MATHML = "http://www.w3.org/1998/Math/MathML";
const ELEMENTS = new Set(
  ("math mfrac mi mn mo mover mpadded mphantom mroot mrow ms mspace msqrt mstyle msub msubsup msup mtable mtd mtext " +
    "mtr munder munderover menclose").split(" "),
);
const ATTRIBUTES = new Set(
  ("accent accentunder columnalign depth display displaystyle fence form height largeop linethickness lspace " +
    "mathsize mathvariant maxsize minsize movablelimits notation rowspacing rspace scriptlevel separator stretchy " +
    "symmetric voffset width").split(" "),
);
const STYLES = /^(border|padding|textAlign|fontStyle|fontWeight)/;
const LIMITS = { throwOnError: true, maxExpand: 300, maxSize: [5, 60] }; // em and points: nothing fills the screen
const LONGEST = 2100; // characters of one formula; its end is not looked for beyond: hostile text would take forever
const DEEPEST = 60; // elements in each other
const BOX = String.raw`\\boxed\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,200}\}){0,200}\}){0,200}\}){0,400}\}`;
// $$ $$, \[ \], \( \), $ $ (on one line, as in pandoc: no space inside its ends, no digit after it: prices),
// environments and boxes on their own.
const FORMULA = new RegExp(
  String.raw`\$\$([^$]{1,2000}?)\$\$|\\\[([^]{1,2000}?)\\\]|\\\(([^]{1,2000}?)\\\)|` +
    String.raw`(?<![\\$])\$(?![\s$])((?:[^$\\\n]|\\[^\n]){0,2000}?(?:[^$\s\\]|\\[^\n\s]))\$(?![\d$])|` +
    String.raw`(\\begin\{([a-z]{1,20}\*?)\}[^]{0,2000}?\\end\{\6\})|(${BOX})`,
  "g",
);

/** Text with its formulas drawn, unless the address asks for it as it was written. */
export function withMath(text) {
  if (!globalThis.temml || place().query.tex === "written") return visible(text);
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(FORMULA)) {
    const [source, dollars, square, round, dollar, environment, , box] = found;
    parts.push(visible(text.slice(end, found.index)));
    const tex = dollars ?? square ?? round ?? dollar ?? environment ?? box;
    parts.push(html`<${Formula} tex=${tex} source=${source} display=${Boolean(dollars ?? square ?? environment)} />`);
    end = found.index + source.length;
  }
  return [...parts, visible(text.slice(end))];
}

function Formula({ tex, source, display }) {
  const box = useRef(null);
  const tree = useMemo(() => drawn(tex, display), [tex, display]);
  useLayoutEffect(() => box.current?.replaceChildren(tree), [tree]);
  if (!tree) return visible(source);
  const long = display || source.length > 40 ? "long" : "";
  return html`<span class="math ${long}" ref=${box} title=${visible(source)} tabindex=${long ? 0 : undefined}></span>`;
}

function drawn(tex, display) {
  if (tex.length > LONGEST || visible(tex) !== tex) return null;
  try {
    return made(temml.__renderToMathMLTree(tex, { ...LIMITS, displayMode: display }), 0);
  } catch {
    return null;
  }
}

/** DOM of Temml's tree; elements, attributes and styles of other names are left out, what is inside them is not. */
function made(node, depth) {
  if (depth > DEEPEST) throw new RangeError("a formula this deep is left as it was written");
  if (typeof node.text === "string") return document.createTextNode(node.text);
  const known = ELEMENTS.has(node.type);
  const element = known ? document.createElementNS(MATHML, node.type) : document.createDocumentFragment();
  for (const child of node.children || []) element.append(made(child, depth + 1));
  if (!known) return element;
  for (const [name, value] of Object.entries(node.attributes || {}))
    if (ATTRIBUTES.has(name)) element.setAttribute(name, value);
  for (const [name, value] of Object.entries(node.style || {})) if (STYLES.test(name)) element.style[name] = value;
  return element;
}

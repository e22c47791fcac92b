// Making elements; text only ever enters through textContent.

// The element of the markup that every caller knows to be there, and what kind it is.
/** @type {(selector: string, within?: ParentNode) => any} */
const $ = (selector, within = document) => within.querySelector(selector);

/**
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {{ text?: string, classes?: string, data?: string, [attribute: string]: unknown }} attributes `data` is a test's name
 * @param {(Node | string)[]} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
function element(tag, { text, classes, data, ...attributes } = {}, children = []) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (classes) node.className = classes;
  if (data) node.dataset.testid = data;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** @type {(selector: string) => NodeListOf<any>} */
const elements = (selector) => document.querySelectorAll(selector);

// The focused element, if it is within `box`.
/** @param {HTMLElement} box */
function focusedIn(box) {
  const node = document.activeElement;
  return node instanceof HTMLElement && box.contains(node) ? node : null;
}

// Gives a cell of a table a bar as long as a share.
/** @param {HTMLElement} cell @param {number} share */
function withBar(cell, share) {
  cell.style.setProperty("--share", `${100 * Math.min(1, share)}%`);
  return cell;
}

// Scrolls `box`, and nothing around it, until `child` is in view.
/** @param {HTMLElement} box @param {HTMLElement} child */
function reveal(box, child) {
  const outer = box.getBoundingClientRect();
  const inner = child.getBoundingClientRect();
  if (inner.top < outer.top) box.scrollTop -= outer.top - inner.top + 4;
  else if (inner.bottom > outer.bottom) box.scrollTop += inner.bottom - outer.bottom + 4;
}

// ---- what floats beside the pointer, on pages that have it ----

/** @param {number} x @param {number} y @param {string[]} lines */
function showTip(x, y, lines) {
  const tip = $("#tip");
  tip.replaceChildren(...lines.map((text) => element("div", { text })));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width > innerWidth ? x - 14 - width : x + 14;
  const top = y + 16 + height > innerHeight ? y - 12 - height : y + 16;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() {
  $("#tip").hidden = true;
}

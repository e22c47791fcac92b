// Texts in the reader's language: the command's choice, else the remembered one, else the browser's.

const spoken = JSON.parse($("#texts").textContent); // { chosen, names: { code: name }, texts: { code: { key: text } } }

/** @param {string} name */
function remembered(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // storage may be forbidden
  }
}

let language = [spoken.chosen, remembered("polyhead-language"), ...(navigator.languages ?? [])]
  .map((code) => code?.slice(0, 2).toLowerCase()).find((code) => code in spoken.texts) ?? "en";

// The text of a key with its {places} filled.
/** @param {string} key @param {Record<string, unknown>} values */
function t(key, values = {}) {
  return spoken.texts[language][key].replace(/\{(\w+)\}/g, (/** @type {string} */ _, /** @type {string} */ name) => values[name]);
}

// The text of a key that may not be there: what a caller named has no translation.
/** @param {string} key @param {string} otherwise @returns {string} */
const told = (key, otherwise) => spoken.texts[language][key] ?? otherwise;

const TRANSLATED = [
  ["tLabel", "aria-label"], ["tTitle", "title"], ["tHint", "placeholder"], ["tRole", "aria-roledescription"],
];

// Fills the page's own markup: data-t is an element's text, data-t-label its aria-label, and so on.
function translate() {
  document.documentElement.lang = language === "zh" ? "zh-Hans" : language;
  for (const node of elements("[data-t]")) node.textContent = t(node.dataset.t);
  for (const [data, attribute] of TRANSLATED) {
    const selector = `[data-${data.replace(/[A-Z]/g, (letter) => `-${letter.toLowerCase()}`)}]`;
    for (const node of elements(selector)) node.setAttribute(attribute, t(node.dataset[data]));
  }
}

// Offers the languages in a select; `changed` redraws what scripts have written.
/** @param {() => void} changed */
function startLanguage(changed) {
  const select = $("#language");
  select.append(...Object.entries(spoken.names).map(([value, text]) =>
    element("option", { value, text, lang: value })));
  select.value = language;
  select.addEventListener("change", () => {
    language = select.value;
    try {
      localStorage.setItem("polyhead-language", language);
    } catch {
      // The choice then lasts as long as the page.
    }
    translate();
    changed();
  });
  translate();
}

// Making elements; text only ever enters through textContent.

const $ = (selector) => document.querySelector(selector);

function element(tag, { text, classes, data, ...attributes } = {}, children = []) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (classes) node.className = classes;
  if (data) node.dataset.testid = data;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

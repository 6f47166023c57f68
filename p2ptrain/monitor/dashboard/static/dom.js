// DOM helpers. Text from peers only becomes text nodes, never HTML.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value == null) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

// Leaves unchanged text alone, to keep selections and the position of screen readers.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function table(caption, columns, rows) {
  const head = el("tr", {}, ...columns.map((name) => el("th", { scope: "col" }, name)));
  const body = rows.map(([first, ...rest]) => el("tr", {}, el("th", { scope: "row" }, first), ...rest.map((cell) => el("td", {}, cell))));
  return el("table", { class: "figures" }, el("caption", { class: "visually-hidden" }, caption), el("thead", {}, head), el("tbody", {}, ...body));
}

// Small helpers: elements, and numbers as people read them.

export function h(tag, props = {}, ...children) {
  const el = document.createElement(tag);
  for (const [key, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (key === "style") for (const [name, one] of Object.entries(value)) el.style.setProperty(name, one);
    else if (key.startsWith("on")) el.addEventListener(key.slice(2), value);
    else if (key in el && key !== "list" && typeof value !== "string") el[key] = value;
    else el.setAttribute(key === "className" ? "class" : key, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined && child !== false) el.append(child);
  return el;
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

export function num(value, digits = 4) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(Math.max(0, digits - 2)).replace("e+", "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

/** Large counts in three digits: 1.96 M. */
export function big(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["", " k", " M", " G", " T"];
  let at = 0;
  while (Math.abs(value) >= (at ? 1000 : 10000) && at < units.length - 1) { value /= 1000; at += 1; }
  return `${at ? value.toPrecision(3) : num(value, 4)}${units[at]}`;
}

/** Four digits, zeros too: numbers that are compared stand in equal form. */
export const fixed = (value, digits = 4) => (value === null || value === undefined || !Number.isFinite(value) ? "–" : Math.abs(value) >= 1e-3 && Math.abs(value) < 1e4 ? value.toPrecision(digits) : num(value, digits));

export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${Number(value.toPrecision(3))} ${units[at]}`;
}

export function secs(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0 s";
  if (size < 1e-3) return `${Number((value * 1e6).toPrecision(3))} µs`;
  if (size < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (size < 60) return `${Number(value.toPrecision(3))} s`;
  if (size < 3600) return `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
  if (size < 86400) return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} d ${Math.round((value % 86400) / 3600)} h`;
}

export const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(digits)} %`);
export const signed = (ratio) => `${ratio >= 0 ? "+" : "−"}${Math.abs(ratio * 100).toFixed(0)} %`;
export const clock = (time) => new Date(time * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
export const day = (time) => new Date(time * 1000).toLocaleString([], { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });

export function ago(time) {
  if (!time) return "–";
  const past = Date.now() / 1000 - time;
  return past < 5 ? "now" : `${secs(Math.round(past)).replace(/ \d+ s$/, past > 600 ? "" : "$&")} ago`;
}

let hide = 0;
export function toast(text) {
  const el = document.getElementById("toast");
  el.textContent = text;
  el.classList.add("on");
  clearTimeout(hide);
  hide = setTimeout(() => el.classList.remove("on"), 6000);
}

export function card(width, title, note, ...children) {
  const tools = children.filter((child) => child && child.tools).map((child) => child.tools);
  const rest = children.filter((child) => child && !child.tools);
  return h("section", { className: `card ${width}`, "aria-label": title },
    h("header", {}, h("h2", {}, title), note ? h("span", { className: "note" }, note) : null, tools.length ? h("div", { className: "tools" }, ...tools) : null),
    ...rest);
}

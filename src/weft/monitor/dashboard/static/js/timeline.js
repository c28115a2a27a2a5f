// What happened when: one lane a kind, over the time of the clock.
import { card, clock, day, h, num, secs } from "./dom.js";

const NS = "http://www.w3.org/2000/svg";
const LANES = [["training", ["start"]], ["evaluations", ["eval"]], ["checkpoints", ["checkpoint", "copy"]], ["warnings", ["warning", "alert", "drift", "action", "held"]], ["failures", ["failure", "not finite"]]];
const DYE = { quiet: "moss", good: "teal", warning: "ochre", critical: "madder" };

function s(tag, props, ...children) {
  const el = document.createElementNS(NS, tag);
  for (const [key, value] of Object.entries(props)) el.setAttribute(key, value);
  el.append(...children);
  return el;
}

/** Spans of training out of starts, ends and failures. */
function spans(marks, until) {
  const found = [];
  let begun = null;
  for (const mark of marks) {
    if (mark.time === null) continue;
    if (mark.kind === "start") { if (begun !== null) found.push([begun, mark.time]); begun = mark.time; }
    else if (["end", "failure", "held"].includes(mark.kind) && begun !== null) { found.push([begun, mark.time]); begun = null; }
  }
  if (begun !== null) found.push([begun, until]);
  return found;
}

export class Timeline {
  constructor() {
    this.box = h("div");
    this.read = h("p", { className: "read" }, "Point at a mark to read it.");
    this.el = card("", "Timeline", null, this.box, this.read);
    this.note = h("span", { className: "note" });
    this.el.querySelector("h2").after(this.note);
    this.watch = new ResizeObserver(() => this.draw());
    this.watch.observe(this.box);
  }

  set(marks, evals, line) { this.marks = marks; this.evals = evals; this.line = line; this.draw(); }

  draw() {
    const width = this.box.clientWidth, { marks, line } = this;
    if (!marks || !line || width < 60) return;
    const times = marks.map((mark) => mark.time).filter((time) => time);
    const first = Math.min(line.begun || Infinity, ...times), last = Math.max(line.time || 0, ...times);
    if (!(last > first)) { this.el.hidden = true; return; }
    this.el.hidden = false;
    const left = width < 500 ? 0 : 92, lane = 19, top = 6, height = 118;
    const x = (time) => left + ((time - first) / (last - first)) * (width - left - 8) + 2;
    const svg = s("svg", { class: "strip", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Events over time" });
    LANES.forEach(([name, kinds], row) => {
      const y = top + row * lane;
      if (left) svg.append(s("text", { x: 0, y: y + 11 }, name));
      svg.append(s("line", { x1: left, x2: width, y1: y + 7.5, y2: y + 7.5, stroke: "var(--line)" }));
      if (name === "training") for (const [begin, end] of spans(marks, last)) svg.append(this.told(s("rect", { x: x(begin), y: y + 2, width: Math.max(2, x(end) - x(begin)), height: 11, rx: 3, fill: "var(--teal)" }), `trained from ${clock(begin)} to ${clock(end)}: ${secs(end - begin)}`));
      else if (name === "evaluations") (this.evals?.time || []).forEach((time, at) => time && svg.append(this.told(s("rect", { x: x(time) - 1, y: y + 2, width: 2.5, height: 11, rx: 1, fill: "var(--indigo)" }), `evaluation at step ${num(this.evals.step[at], 9)}: loss ${num(this.evals.loss[at], 5)}`)));
      else for (const mark of marks) if (mark.time && kinds.includes(mark.kind)) svg.append(this.told(name === "checkpoints" ? s("rect", { x: x(mark.time) - 1, y: y + 2, width: 2.5, height: 11, rx: 1, fill: "var(--moss)" }) : s("circle", { cx: x(mark.time), cy: y + 7.5, r: 5, fill: `var(--${DYE[mark.level] || "stone"})` }), `${mark.kind} at ${clock(mark.time)}: ${mark.text}`));
    });
    svg.append(s("text", { x: left, y: height - 4 }, day(first)), s("text", { x: width, y: height - 4, "text-anchor": "end" }, day(last)));
    this.note.textContent = `${secs(last - first)} by the clock`;
    this.box.replaceChildren(svg);
  }

  told(el, text) {
    el.append(s("title", {}, text));
    el.addEventListener("pointerenter", () => { this.read.textContent = text; });
    return el;
  }
}

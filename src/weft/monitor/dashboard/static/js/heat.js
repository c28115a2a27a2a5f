// Ranks over steps: how long each rank was busy, over the median rank. A slow rank is a line of madder.
import { card, colour, h, num } from "./dom.js";

const SPREAD = 30; // hundredths above the median that give the full colour

function parse(name) {
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  probe.fillStyle = colour(name);
  probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data];
}

function table() {
  const middle = parse("sunk"), hot = parse("madder"), cold = parse("sky"), silent = parse("ink");
  return Array.from({ length: 256 }, (_, byte) => {
    if (byte === 0) return silent;
    const share = Math.max(-1, Math.min(1, (byte - 100) / SPREAD));
    const end = share > 0 ? hot : cold;
    const weight = Math.pow(Math.abs(share), 1.25);
    return [0, 1, 2].map((at) => Math.round(middle[at] + (end[at] - middle[at]) * weight)).concat(255);
  });
}

export class Heat {
  constructor() {
    this.canvas = h("canvas", { className: "heat", role: "img" });
    this.read = h("p", { className: "read" }, "Point at the map to read a rank.");
    this.axis = h("div", { className: "axis" });
    this.note = h("span", { className: "note" });
    this.bar = h("canvas", { width: 110, height: 9 });
    const scale = h("span", { className: "scale" }, "−30 %", this.bar, "+30 % of the median rank");
    this.el = card("", "Ranks over steps", null, this.canvas, this.axis, this.read, { tools: scale });
    this.el.querySelector("header h2").after(this.note);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.data = null;
  }

  set(data) {
    this.data = data;
    this.el.hidden = !data.rows || !data.steps.length;
    if (this.el.hidden) return;
    data.bytes = Uint8Array.from(atob(data.cells), (letter) => letter.charCodeAt(0));
    this.draw();
  }

  draw() {
    const { data, canvas } = this;
    if (!data || !data.bytes) return;
    const columns = data.steps.length, colours = table();
    canvas.width = columns; canvas.height = data.rows;
    canvas.style.height = `${Math.max(48, Math.min(340, data.rows * (data.rows <= 32 ? 18 : 4)))}px`;
    const ctx = canvas.getContext("2d"), image = ctx.createImageData(columns, data.rows);
    data.bytes.forEach((byte, at) => image.data.set(colours[byte], at * 4));
    ctx.putImageData(image, 0, 0);
    const bar = this.bar.getContext("2d");
    for (let x = 0; x < 110; x += 1) {
      const [r, g, b] = colours[Math.round(100 - SPREAD + (2 * SPREAD * x) / 109)];
      bar.fillStyle = `rgb(${r} ${g} ${b})`;
      bar.fillRect(x, 0, 1, 9);
    }
    const slow = data.slowest;
    this.note.textContent = slow && slow.ratio > 1.05 ? `rank ${slow.rank} is the slowest now: ${num(slow.ratio, 3)} × the median` : `${data.ranks} ranks, none stands out now`;
    canvas.setAttribute("aria-label", this.note.textContent);
    this.axis.replaceChildren(h("span", {}, `step ${num(data.steps[0], 8)}`), h("span", {}, `rank 0 on top, rank ${data.ranks - 1} below`), h("span", {}, `step ${num(data.steps[columns - 1], 8)}`));
  }

  point(event) {
    const { data, canvas } = this;
    const box = canvas.getBoundingClientRect();
    const column = Math.floor(((event.clientX - box.left) / box.width) * data.steps.length);
    const row = Math.floor(((event.clientY - box.top) / box.height) * data.rows);
    if (column < 0 || row < 0 || column >= data.steps.length || row >= data.rows) return;
    const byte = data.bytes[row * data.steps.length + column];
    const who = data.group > 1 ? `ranks ${row * data.group} to ${row * data.group + data.group - 1}, slowest` : `rank ${row}`;
    this.read.textContent = byte === 0 ? `${who}: silent until step ${num(data.steps[column], 8)}` : `${who}, until step ${num(data.steps[column], 8)}: ${byte >= 250 ? "2.5 × the median or more" : `${num(byte / 100, 3)} × the median`}`;
  }
}

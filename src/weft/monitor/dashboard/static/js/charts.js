// Curves on uPlot: one look, one cursor over all of a page, drag to zoom.
import { colour, h, num } from "./dom.js";

const uPlot = window.uPlot;
const PALETTE = ["indigo", "madder", "teal", "ochre", "plum", "sky", "moss", "stone"];
export const dye = (at) => PALETTE[at % PALETTE.length];
const clear = (name, share) => `color-mix(in srgb, ${colour(name)} ${share}%, transparent)`;
const FONT = '12px Inter, ui-sans-serif, system-ui, sans-serif';

function axes(yText) {
  const both = { stroke: () => colour("soft"), grid: { stroke: () => colour("line"), width: 1 }, ticks: { show: false }, font: FONT };
  return [
    { ...both, grid: { show: false }, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))), space: 70, size: 28 },
    { ...both, grid: { ...both.grid, filter: tens }, filter: tens, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : yText(tick))), size: (plot, values) => Math.max(34, ...((values || []).map((text) => 10 + 7 * text.length))), space: 34 },
  ];
}

/** On a logarithmic axis the powers of ten, or all where there are too few of these. */
const tens = (plot, ticks) => (plot.scales.y.distr !== 3 ? ticks : ticks.map((tick) => (Number.isInteger(+Math.log10(tick).toFixed(6)) || ticks.length < 6 ? tick : null)));

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(0).replace("e-", "e−") : String(+value.toPrecision(4));
}

/** One chart. spec: {series: [{label, dye, band, dash, points, fill, quiet, value}], height, text, log, marks, sync, onZoom} */
export class Chart {
  constructor(spec) {
    this.spec = { height: 220, text: short, ...spec };
    this.plotEl = h("div");
    this.el = h("div", { className: "chart", role: "img", "aria-label": spec.label || "chart" });
    if (!spec.plain) this.el.append(this.legend());
    this.el.append(this.plotEl);
    this.plot = null;
    this.data = null;
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(this.el);
  }

  legend() {
    this.values = new Map();
    const keys = this.spec.series.map((one, at) => {
      if (one.quiet) return null;
      const value = h("b");
      this.values.set(at + 1, value);
      return h("span", {}, h("i", { style: { background: `var(--${one.dye})` } }), one.label, value);
    });
    this.at = h("span", { className: "at" });
    return h("div", { className: "legend", "aria-hidden": "true" }, ...keys, this.at);
  }

  /** Below the pointer, or at the newest step. */
  tell(row) {
    if (!this.values || !this.data) return;
    const x = this.data[0], last = x.length - 1, here = row === null || row === undefined ? last : row;
    for (const [at, el] of this.values) {
      const column = this.data[at] || [];
      let from = here;
      while (from > 0 && (column[from] === null || column[from] === undefined) && here - from < 400) from -= 1;
      const one = this.spec.series[at - 1], value = column[from];
      el.textContent = one.tell ? one.tell(from) : value === null || value === undefined ? "" : (one.value || this.spec.text)(value);
    }
    this.at.textContent = row === null || row === undefined || x[here] === undefined ? "" : `step ${num(x[here], 9)}`;
  }

  options(width) {
    const { spec } = this;
    const series = spec.series.map((one) => ({
      label: one.label,
      stroke: one.quiet ? "transparent" : () => (one.faint ? clear(one.dye, one.faint) : colour(one.dye)),
      width: one.points ? 1.5 : one.width || 1.6,
      dash: one.dash,
      spanGaps: true,
      fill: one.fill ? () => clear(one.dye, one.fill) : undefined,
      paths: one.points === "only" ? () => null : undefined,
      points: one.points ? { show: true, size: 6, fill: () => colour("card"), stroke: () => colour(one.dye), width: 2 } : { show: false },
    }));
    return {
      width, height: spec.height,
      scales: { x: { time: false }, y: { distr: spec.log ? 3 : 1, range: spec.range } },
      axes: axes(spec.text),
      series: [{ label: "step" }, ...series],
      bands: (spec.bands || []).map(([above, below, name, share]) => ({ series: [above, below], fill: () => clear(name, share) })),
      cursor: { sync: spec.sync ? { key: spec.sync, setSeries: false } : undefined, points: { size: 7 }, drag: { x: true, y: false, setScale: false }, focus: { prox: 24 } },
      legend: { show: false },
      hooks: {
        setCursor: [(plot) => this.tell(plot.cursor.left < 0 ? null : plot.cursor.idx)],
        setSelect: [(plot) => {
          if (plot.select.width > 6 && spec.onZoom) spec.onZoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => spec.onZoom && spec.onZoom(null, null))],
        draw: [(plot) => this.drawMarks(plot)],
      },
    };
  }

  drawMarks(plot) {
    const found = this.spec.marks ? this.spec.marks() : [];
    const { ctx, bbox } = plot;
    ctx.save();
    for (const mark of found) {
      const x = Math.round(plot.valToPos(mark.step, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      const size = 5 * devicePixelRatio;
      ctx.strokeStyle = ctx.fillStyle = colour(mark.dye);
      ctx.globalAlpha = 0.55;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      ctx.globalAlpha = 1;
      ctx.beginPath(); ctx.moveTo(x - size, bbox.top); ctx.lineTo(x + size, bbox.top); ctx.lineTo(x, bbox.top + size * 1.5); ctx.fill();
    }
    ctx.restore();
  }

  set(data) {
    this.data = data;
    if (this.plot) this.plot.setData(data);
    else this.resize();
    for (const [at, el] of this.values || []) el.parentElement.hidden = !(data[at] || []).some((value) => value !== null && value !== undefined);
    this.tell(null);
  }

  resize() {
    const width = Math.floor(this.el.clientWidth);
    if (!this.data || width < 50) return;
    if (!this.plot) { this.plot = new uPlot(this.options(width), this.data, this.plotEl); return; }
    if (this.plot.width !== width) this.plot.setSize({ width, height: this.spec.height });
  }

  rebuild(changes = {}) {
    Object.assign(this.spec, changes);
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.resize();
  }

  destroy() { this.watch.disconnect(); if (this.plot) this.plot.destroy(); }
}

/** Columns with a common x out of tables with an x each. */
export const join = (...tables) => uPlot.join(tables);

/** A moving mean that forgets by half over `span` points. */
export function smooth(values, span) {
  const keep = Math.exp(-1 / span);
  let mean = 0, weight = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = keep * mean + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

/** A small curve without axes. */
export function spark(values, name = "indigo") {
  const canvas = h("canvas", { className: "spark", "aria-hidden": "true" });
  const scale = Math.max(1, devicePixelRatio);
  canvas.width = 120 * scale; canvas.height = 30 * scale;
  const known = values.filter((value) => value !== null);
  if (known.length > 1) {
    const low = Math.min(...known), high = Math.max(...known), ctx = canvas.getContext("2d");
    ctx.strokeStyle = colour(name); ctx.lineWidth = 1.5 * scale; ctx.lineJoin = "round"; ctx.beginPath();
    let first = true;
    values.forEach((value, at) => {
      if (value === null) return;
      const x = (at / (values.length - 1)) * (canvas.width - 4) + 2;
      const y = canvas.height - 3 * scale - ((value - low) / (high - low || 1)) * (canvas.height - 6 * scale);
      if (first) ctx.moveTo(x, y); else ctx.lineTo(x, y);
      first = false;
    });
    ctx.stroke();
  }
  return canvas;
}

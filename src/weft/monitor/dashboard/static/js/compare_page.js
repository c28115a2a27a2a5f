// Several runs side by side: their curves on one chart, their facts in one table, what differs in their configs.
import { get } from "./api.js";
import { stack } from "./account.js";
import { Chart, dye, join, smooth } from "./charts.js";
import { big, bytes, card, fixed, h, num, percent, secs } from "./dom.js";

const CHARTS = [
  ["loss", "Loss", "w8", 300], ["evals", "Evaluation loss", "w4", 300], ["rate", "Throughput, per second", "w6", 220], ["total", "Step time", "w6", 220], ["lr", "Learning rate", "w6", 170], ["grad_norm", "Gradient norm", "w6", 170],
];

export class ComparePage {
  constructor(ids) {
    this.ids = ids;
    this.lines = new Map();
    this.range = [null, null];
    this.charts = new Map();
    this.el = h("div");
    this.heroEl = h("div", {}, h("div", { className: "hero" }, h("h1", {}, `${ids.length} runs side by side`)));
    this.table = h("div", { className: "scroll" });
    this.grid = h("div", { className: "grid" });
    this.differs = h("div");
    this.differs.style.display = "contents";
    const charts = CHARTS.map(([name, title, width, height]) => {
      const chart = new Chart({
        label: title, height, sync: "compare", text: name === "total" ? secs : name === "rate" ? big : undefined, range: name === "total" ? () => [0, this.top || 1] : undefined, log: name === "grad_norm", onZoom: (first, last) => this.zoom(first, last),
        series: ids.map((id, at) => ({ label: id, dye: dye(at), points: name === "evals", value: name === "total" ? secs : name === "rate" ? big : (v) => num(v, 5) })),
      });
      chart.spec.text = chart.spec.text || ((value) => num(value, 4));
      this.charts.set(name, chart);
      return card(width, title, name === "loss" ? "smoothed; drag to look closer, double-click to go back" : null, chart.el);
    });
    this.grid.append(card("", "Now", null, this.table), ...charts, this.differs);
    this.el.append(this.heroEl, this.grid);
    this.due = 0;
  }

  async load() {
    const [curves, configs] = await Promise.all([this.fetch(), Promise.all(this.ids.map((id) => get("config", { id })))]);
    this.data = curves;
    this.draw();
    this.drawDifferences(configs);
  }

  fetch() { return Promise.all(this.ids.map((id) => get("curves", { id, from: this.range[0], to: this.range[1], points: 500 }))); }

  async zoom(first, last) {
    this.range = first === null ? [null, null] : [Math.floor(first), Math.ceil(last)];
    this.data = await this.fetch();
    this.draw();
  }

  async update(line) {
    if (!this.ids.includes(line.id)) return;
    const known = this.lines.get(line.id);
    this.lines.set(line.id, line);
    this.drawTable();
    if (!known || known.version === line.version || this.busy || document.hidden) return;
    this.busy = true;
    await new Promise((done) => setTimeout(done, Math.max(0, this.due - Date.now())));
    try { this.data = await this.fetch(); this.draw(); } finally { this.busy = false; this.due = Date.now() + 2000; }
  }

  draw() {
    for (const [name, chart] of this.charts) {
      const tables = this.data.map((run) => {
        if (name === "evals") return [run.evals.step, run.evals.loss || []];
        if (name === "total") return [run.x, run.phases.total || run.x.map(() => null)];
        const column = (run.series[name] || { mean: run.x.map(() => null) }).mean;
        return [run.x, name === "loss" ? smooth(column, 3) : name === "grad_norm" ? column.map((v) => (v > 0 ? v : null)) : column];
      });
      if (name === "total") {
        const all = tables.flatMap(([, column]) => column.filter((value) => value !== null)).sort((one, other) => one - other);
        this.top = all.length ? Math.min(all[all.length - 1], all[Math.floor(all.length * 0.95)] * 1.6) * 1.05 : 1;
      }
      chart.set(join(...tables));
    }
  }

  drawTable() {
    const lines = this.ids.map((id) => this.lines.get(id)).filter(Boolean);
    const row = (name, of) => h("tr", {}, h("th", { scope: "row" }, name), ...lines.map((line) => h("td", {}, of(line))));
    this.table.replaceChildren(h("table", {},
      h("thead", {}, h("tr", {}, h("th"), ...lines.map((line) => h("th", { scope: "col" }, h("span", { className: "dot", style: { background: `var(--${dye(this.ids.indexOf(line.id))})` } }), h("a", { href: `#/run/${encodeURIComponent(line.id)}` }, line.id))))),
      h("tbody", {},
        row("State", (line) => h("span", { className: `pill ${line.state}` }, line.state)),
        row("Step", (line) => `${num(line.step, 9)}${line.steps ? ` of ${num(line.steps, 9)}` : ""}`),
        row("Loss", (line) => fixed(line.now.loss)), row("Evaluation", (line) => fixed(line.eval.loss)),
        row("Per second", (line) => `${big(line.now.rate)} ${line.unit}`), row("Step time", (line) => secs(line.step_s)), row("Memory", (line) => bytes(line.memory)),
        row("Goodput", (line) => h("span", {}, percent(line.ledger.share), stack(line.ledger.seconds, "mini"))),
        ...(lines.some((line) => line.ledger.cost) ? [row("Cost", (line) => (line.ledger.cost ? `${line.ledger.cost.total.toFixed(2)} ${line.ledger.cost.currency}` : "–"))] : []),
        row("Plan", (line) => h("code", {}, line.plan)))));
  }

  drawDifferences(configs) {
    const names = [...new Set(configs.flatMap((config) => Object.keys(config)))].filter((name) => new Set(configs.map((config) => config[name])).size > 1 && name !== "run.name");
    this.differs.replaceChildren(card("", "What differs", `${names.length} of ${new Set(configs.flatMap((config) => Object.keys(config))).size} settings`,
      names.length ? h("div", { className: "scroll tall", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting"), ...this.ids.map((id) => h("th", { scope: "col" }, id)))), h("tbody", {}, ...names.map((name) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), ...configs.map((config) => h("td", {}, h("code", {}, config[name] ?? "–")))))))) : h("p", { className: "empty" }, "Nothing but their names.")));
  }

  restyle() { for (const chart of this.charts.values()) chart.rebuild(); }
  destroy() { for (const chart of this.charts.values()) chart.destroy(); }
}

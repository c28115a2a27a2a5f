// All runs of a folder: one line each, and their ledgers added up.
import { ledgerCard, stack } from "./account.js";
import { spark } from "./charts.js";
import { ago, big, fixed, h, num, percent, secs } from "./dom.js";

export class ShelfPage {
  constructor(root, lines) {
    this.root = root;
    this.lines = new Map(lines.map((line) => [line.id, line]));
    this.chosen = new Set();
    this.compare = h("button", { className: "act", type: "button", disabled: true, onclick: () => { location.hash = `#/compare/${[...this.chosen].map(encodeURIComponent).join("/")}`; } }, "Compare");
    this.search = h("input", { className: "search", type: "search", placeholder: "Find a run", "aria-label": "Find a run" });
    this.search.addEventListener("input", () => this.draw());
    this.body = h("tbody");
    this.total = h("div");
    this.total.style.display = "contents";
    this.rows = new Map();
    const head = ["", "Run", "State", "Step", "Loss", "", "Rate", "Goodput", "Last word"];
    this.el = h("div", {},
      h("div", { className: "hero" }, h("h1", {}, root || "Runs"), h("div", { className: "acts" }, this.search, this.compare)),
      h("p", { className: "sub" }),
      h("div", { className: "grid" },
        h("section", { className: "card", "aria-label": "Runs" }, h("div", { className: "scroll" }, h("table", { className: "runs" }, h("thead", {}, h("tr", {}, ...head.map((text, at) => h("th", { scope: "col", className: [5, 6, 8].includes(at) ? "wide-only" : "" }, text)))), this.body))),
        this.total));
    this.draw();
  }

  async load() {}

  update(line) {
    this.lines.set(line.id, line);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.draw(), 60);
  }

  draw() {
    const wanted = this.search.value.toLowerCase();
    const lines = [...this.lines.values()].filter((line) => `${line.id} ${line.plan} ${line.model} ${line.state}`.toLowerCase().includes(wanted)).sort((one, other) => (other.time || 0) - (one.time || 0));
    this.body.replaceChildren(...lines.map((line) => this.row(line)));
    const running = lines.filter((line) => line.state === "running").length;
    this.el.querySelector(".sub").textContent = `${lines.length} run${lines.length === 1 ? "" : "s"}, ${running} training now`;
    this.total.replaceChildren(ledgerCard(sum(lines.map((line) => line.ledger)), ""));
  }

  row(line) {
    const known = this.rows.get(line.id);
    if (known && known.version === line.version && known.state === line.state) return known.el;
    const box = h("input", { type: "checkbox", checked: this.chosen.has(line.id), "aria-label": `Compare ${line.id}` });
    box.addEventListener("change", () => {
      if (box.checked) this.chosen.add(line.id); else this.chosen.delete(line.id);
      this.compare.disabled = this.chosen.size < 2;
      this.compare.textContent = this.chosen.size < 2 ? "Compare" : `Compare ${this.chosen.size}`;
    });
    const el = h("tr", {}, h("td", {}, box),
      h("td", {}, h("a", { href: `#/run/${encodeURIComponent(line.id)}` }, line.id), h("span", { className: "plan" }, [line.model, line.plan].filter(Boolean).join(" · "))),
      h("td", {}, h("span", { className: `pill ${line.state}` }, line.state)),
      h("td", {}, num(line.step, 9), line.steps ? h("span", { className: "plan" }, `of ${num(line.steps, 9)}`) : ""),
      h("td", {}, fixed(line.now.loss), line.eval.loss !== undefined && line.eval.loss !== null ? h("span", { className: "plan" }, `eval ${fixed(line.eval.loss)}`) : ""),
      h("td", { className: "wide-only" }, spark(line.spark)),
      h("td", { className: "wide-only" }, big(line.now.rate), h("span", { className: "plan" }, `${line.unit}/s`)),
      h("td", {}, percent(line.ledger.share, 0), stack(line.ledger.seconds, "mini")),
      h("td", { className: "wide-only" }, line.left_s ? `${secs(line.left_s)} left` : ago(line.time)));
    this.rows.set(line.id, { version: line.version, state: line.state, el });
    return el;
  }

  restyle() { this.rows.clear(); this.draw(); }
  destroy() { clearTimeout(this.timer); }
}

function sum(ledgers) {
  const total = { seconds: {}, wall_s: 0, failures: 0, starts: 0, device_s: 0 };
  for (const one of ledgers) {
    for (const [cause, value] of Object.entries(one.seconds)) total.seconds[cause] = (total.seconds[cause] || 0) + value;
    for (const name of ["wall_s", "failures", "starts", "device_s"]) total[name] += one[name];
    if (one.energy && one.energy.kwh !== null) {
      const known = total.energy || { kwh: 0, label: one.energy.label, kwh_by_cause: {}, j_per_item: null, cost: null, co2_g: null, notes: [] };
      for (const [cause, value] of Object.entries(one.energy.kwh_by_cause)) known.kwh_by_cause[cause] = (known.kwh_by_cause[cause] || 0) + value;
      total.energy = { ...known, kwh: known.kwh + one.energy.kwh, label: known.label === one.energy.label ? known.label : "partly estimated" };
    }
    if (one.cost) total.cost = { total: (total.cost ? total.cost.total : 0) + one.cost.total, currency: one.cost.currency };
  }
  total.share = total.wall_s ? (total.seconds.productive || 0) / total.wall_s : null;
  return total;
}

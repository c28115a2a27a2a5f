// One run, from top to bottom.
import { ask, get } from "./api.js";
import { plannedCard, ledgerCard, memoryCard } from "./account.js";
import { Chart, dye, join, smooth } from "./charts.js";
import { ago, big, bytes, card, clock, day, fixed, h, num, percent, secs, signed, toast } from "./dom.js";
import { Heat } from "./heat.js";
import { Timeline } from "./timeline.js";

const LEVEL_DYE = { warning: "ochre", critical: "madder", good: "teal", quiet: "stone" };
const GPU = [
  ["gpu.utilization", "GPU utilisation", percent], ["gpu.memory_bytes", "GPU memory", bytes], ["gpu.temperature", "GPU temperature", (v) => `${num(v, 3)} °C`],
  ["gpu.power", "GPU power", (v) => `${num(v, 3)} W`], ["energy.watts", "Power of the run", (v) => `${num(v, 3)} W`], ["energy.j_per_item", "Energy per item", (v) => `${num(v, 3)} J`], ["gpu.sm_clock", "GPU clock", (v) => `${num(v / 1e6, 4)} MHz`], ["gpu.nvlink_bytes_per_s", "NVLink", (v) => `${bytes(v)}/s`], ["gpu.pcie_bytes_per_s", "PCIe", (v) => `${bytes(v)}/s`],
];
const HOST = [
  ["host.cpu", "CPU of the machines", percent], ["process.cpu", "CPU cores of a rank", (v) => num(v, 3)], ["process.memory_bytes", "Memory of a rank's process", bytes], ["host.memory_free_bytes", "Free memory", bytes],
  ["disk.free_bytes", "Free disk", bytes], ["disk.write_bytes_per_s", "Disk writes", (v) => `${bytes(v)}/s`], ["net.sent_bytes_per_s", "Network out", (v) => `${bytes(v)}/s`], ["net.received_bytes_per_s", "Network in", (v) => `${bytes(v)}/s`],
];

export class RunPage {
  constructor(id) {
    this.id = id;
    this.range = [null, null];
    this.charts = [];
    this.marks = [];
    this.log = false;
    this.smooth = false;
    this.small = new Map();
    this.due = 0;
    this.el = h("div");
    this.heroEl = h("div");
    this.tilesEl = h("dl", { className: "card tiles" });
    this.grid = h("div", { className: "grid" });
    this.el.append(this.heroEl, this.tilesEl, this.grid);
    this.build();
  }

  chart(spec) {
    const chart = new Chart({ sync: "steps", onZoom: (first, last) => this.zoom(first, last), ...spec });
    this.charts.push(chart);
    return chart;
  }

  toggle(text, pressed, act) {
    const button = h("button", { className: "ghost", type: "button", "aria-pressed": String(pressed) }, text);
    button.addEventListener("click", () => { const on = button.getAttribute("aria-pressed") !== "true"; button.setAttribute("aria-pressed", String(on)); act(on); });
    return button;
  }

  build() {
    const marks = () => this.marks.filter((mark) => mark.step !== null && (mark.level === "warning" || mark.level === "critical")).map((mark) => ({ step: mark.step, dye: LEVEL_DYE[mark.level] }));
    this.loss = this.chart({
      label: "Loss over steps", height: 300, marks, bands: [[3, 2, "indigo", 14]],
      series: [
        { label: "loss", dye: "indigo", width: 1.7, value: (v) => num(v, 5) }, { label: "least", dye: "indigo", quiet: true }, { label: "most", dye: "indigo", quiet: true },
        { label: "smoothed", dye: "plum", width: 2.2, value: (v) => num(v, 5) }, { label: "evaluation", dye: "madder", points: true, value: (v) => num(v, 5) },
      ],
    });
    this.reset = h("button", { className: "ghost", type: "button", hidden: true, onclick: () => this.zoom(null, null) }, "Whole run");
    const tools = h("span", {}, this.reset, this.toggle("Smooth", false, (on) => { this.smooth = on; this.draw(); }), this.toggle("Log", false, (on) => { this.loss.rebuild({ log: on }); }));
    this.lossNote = h("span");
    this.rate = this.chart({ label: "Throughput", bands: [[3, 2, "teal", 16]], text: big, series: [{ label: "rate", dye: "teal" }, { label: "least", dye: "teal", quiet: true }, { label: "most", dye: "teal", quiet: true }, { label: "planned", dye: "ochre", dash: [7, 5], width: 1.8 }] });
    this.rateCard = card("w6", "Throughput", "per second, over all ranks", this.rate.el);
    this.phases = null;
    this.phaseBox = h("div");
    this.phaseCard = card("w6", "Where a step's time goes", "first rank", this.phaseBox);
    this.heat = new Heat();
    this.heat.el.hidden = true;
    this.lr = this.chart({ label: "Learning rate", height: 150, series: [{ label: "learning rate", dye: "plum", value: (v) => num(v, 4) }] });
    this.norm = this.chart({ label: "Gradient norm", height: 150, log: true, bands: [[3, 2, "ochre", 18]], series: [{ label: "gradient norm", dye: "ochre", value: (v) => num(v, 4) }, { label: "least", dye: "ochre", quiet: true }, { label: "most", dye: "ochre", quiet: true }] });
    this.slots = { ledger: h("div"), planned: h("div"), memory: h("div"), gpu: h("div"), host: h("div"), config: h("div") };
    for (const slot of Object.values(this.slots)) slot.style.display = "contents";
    this.eventsBox = h("ol", { className: "events tall", tabindex: 0, "aria-label": "Events, newest first" });
    this.kinds = new Set();
    this.kindBox = h("span", {});
    this.eventsCard = card("w8", "Events", "newest first", this.eventsBox, { tools: this.kindBox });
    this.timeline = new Timeline();
    this.grid.append(
      card("", "Loss", "drag to look closer, double-click to go back; marks are alerts and warnings", this.loss.el, { tools }),
      this.rateCard, this.phaseCard, this.heat.el,
      card("w6", "Learning rate", null, this.lr.el), (this.normCard = card("w6", "Gradient norm", "before clipping", this.norm.el)),
      this.slots.ledger, this.slots.planned, this.timeline.el, this.slots.memory, this.eventsCard, this.slots.gpu, this.slots.host, this.slots.config);
  }

  async load() {
    const [curves, heat, marks, comparison, config] = await Promise.all([this.curves(), get("heat", { id: this.id }), get("marks", { id: this.id }), get("planned", { id: this.id }), get("config", { id: this.id })]);
    this.config = config;
    this.data = curves;
    this.comparison = comparison;
    this.setMarks(marks);
    this.heat.set(heat);
    this.draw();
    this.drawConfig();
  }

  curves() { return get("curves", { id: this.id, from: this.range[0], to: this.range[1], points: Math.min(1200, Math.max(300, innerWidth)) }); }

  async zoom(first, last) {
    this.range = first === null ? [null, null] : [Math.floor(first), Math.ceil(last)];
    this.reset.hidden = first === null;
    this.data = await this.curves();
    this.draw();
  }

  /** A run's line has changed: show it, and fetch what belongs to it at most every two seconds. */
  async update(line) {
    const known = this.line;
    this.line = line;
    this.drawHero();
    if (!known || known.version === line.version || this.busy) return;
    const wait = Math.max(0, this.due - Date.now());
    this.busy = true;
    await new Promise((done) => setTimeout(done, wait));
    try {
      if (!document.hidden) {
        const started = known.begun !== line.begun || (known.state === "starting" && line.state !== "starting");
        const heat = this.range[0] === null;
        const [curves, marks, ranks, comparison] = await Promise.all([this.range[0] === null ? this.curves() : this.data, get("marks", { id: this.id }), heat ? get("heat", { id: this.id }) : null, get("planned", { id: this.id })]);
        this.data = curves; this.comparison = comparison;
        this.setMarks(marks);
        if (ranks) this.heat.set(ranks);
        if (started || !Object.keys(this.config).length) { this.config = await get("config", { id: this.id }); this.drawConfig(); }
        this.draw();
      }
    } finally { this.busy = false; this.due = Date.now() + 2000; }
  }

  drawHero() {
    const run = this.line;
    if (!run) return;
    document.title = `${run.id}: ${run.state}`;
    const alive = ["running", "starting", "silent"].includes(run.state);
    const button = (action, text, className, on, question) => h("button", { className: `act ${className}`, type: "button", disabled: !on, onclick: async (event) => {
      if (question && !confirm(question)) return;
      event.target.disabled = true;
      try { await ask(this.id, action); toast(action === "resume" ? "Told to go on." : "Asked. The run does it after its next step."); } catch (error) { toast(error.message); }
      setTimeout(() => this.drawHero(), 1500);
    } }, text);
    const acts = run.state === "held"
      ? [button("resume", "Resume", "go", true)]
      : [button("checkpoint", "Checkpoint", "", alive), button("hold", "Hold", "hold", alive, "Hold the run? It saves, frees its devices and waits for you."), button("stop", "Stop", "stop", alive, "Stop the run? It saves first; the same command goes on from there.")];
    const focus = document.activeElement && this.heroEl.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.heroEl.replaceChildren(
      h("div", { className: "hero" }, h("h1", {}, run.id), h("span", { className: `pill ${run.state}` }, run.state), h("div", { className: "acts" }, ...acts)),
      h("p", { className: "sub" }, run.model ? `${run.model} · ` : "", run.plan ? h("code", {}, run.plan) : "", run.ranks ? ` · ${run.ranks} rank${run.ranks === 1 ? "" : "s"} on ${run.device || "?"}` : "", run.begun ? ` · began ${day(run.begun)}` : "", run.reason ? h("span", { className: run.state === "failed" ? "down" : "" }, ` · ${run.reason}`) : ""),
      h("div", { className: "progress" },
        h("span", {}, "step ", h("b", {}, num(run.step, 9)), run.steps ? ` of ${num(run.steps, 9)}` : "", run.read < 1 ? ` · ${percent(run.read, 0)} of its events read so far` : ""),
        h("span", {}, run.left_s ? `about ${secs(run.left_s)} left` : run.time ? `last word ${ago(run.time)}` : ""),
        h("div", { className: "bar", role: "progressbar", "aria-label": "Steps done", "aria-valuemin": "0", "aria-valuemax": "100", "aria-valuenow": String(Math.round((100 * run.step) / (run.steps || run.step || 1))) }, h("i", { style: { width: `${Math.min(100, (100 * run.step) / (run.steps || run.step || 1))}%` } }))));
    if (focus) [...this.heroEl.querySelectorAll("button")].find((one) => one.textContent === focus)?.focus();
    const plan = run.planned || {};
    const against = (actual, planned, worse) => (actual && planned ? h("span", { className: (actual / planned - 1) * worse > 0.15 ? "down" : "" }, `${signed(actual / planned - 1)} against the plan`) : "");
    const tile = (name, value, unit, below) => h("div", { className: "tile" }, h("dt", {}, name), h("dd", {}, value, unit ? h("small", {}, ` ${unit}`) : ""), h("p", {}, below || ""));
    const metric = Object.entries(run.eval).find(([name, value]) => name !== "loss" && value !== null && name !== run.unit);
    this.tilesEl.replaceChildren(
      tile("Loss", fixed(run.now.loss), "", run.now.grad_norm !== null ? `gradient norm ${num(run.now.grad_norm, 3)}` : ""),
      tile("Evaluation", fixed(run.eval.loss), "", metric ? `${metric[0].replaceAll("_", " ")} ${num(metric[1], 4)}` : ""),
      tile(`${run.unit.replace(/^./, (c) => c.toUpperCase())} per second`, big(run.now.rate), "", against(run.now.rate, plan.tokens_per_s, -1)),
      tile("Step", secs(run.step_s), "", against(run.step_s, plan.step_s, 1)),
      run.now.mfu !== null ? tile("MFU", percent(run.now.mfu), "", "of the devices' peak") : tile("Learning rate", num(run.now.lr, 3), "", ""),
      tile("Memory", bytes(run.memory), "", against(run.memory, plan["memory.bytes"], 1) || "first rank, peak"),
      tile("Goodput", percent(run.ledger.share), "", run.ledger.cost ? `${run.ledger.cost.total.toFixed(2)} ${run.ledger.cost.currency} so far` : `of ${secs(run.ledger.wall_s)}`));
    this.slots.ledger.replaceChildren(ledgerCard(run.ledger));
  }

  draw() {
    const { data } = this;
    if (!data) return;
    const empty = data.x.map(() => null), get = (name) => data.series[name] || { mean: empty };
    const loss = get("loss"), low = (one) => one.low || one.mean, high = (one) => one.high || one.mean;
    const ev = data.evals;
    const smoothed = this.smooth ? smooth(loss.mean, Math.max(4, loss.mean.length / 40)) : empty;
    this.loss.set(ev.step.length ? join([data.x, loss.mean, low(loss), high(loss), smoothed], [ev.step, ev.loss]) : [data.x, loss.mean, low(loss), high(loss), smoothed, empty]);
    const rate = get("rate"), planned = data.planned.tokens_per_s;
    this.rateCard.querySelector("h2").textContent = `${data.unit} per second`.replace(/^./, (c) => c.toUpperCase());
    this.rate.set([data.x, rate.mean, low(rate), high(rate), data.x.map(() => planned ?? null)]);
    this.lr.set([data.x, get("lr").mean]);
    const norm = get("grad_norm");
    this.norm.set([data.x, ...[norm.mean, low(norm), high(norm)].map((column) => column.map((value) => (value > 0 ? value : null)))]);
    const moved = this.line && this.line.now.update_ratio;
    this.normCard.querySelector(".note").textContent = `before clipping${moved ? `; the last update moved the weights by ${num(moved * 100, 2)} %` : ""}`;
    this.drawPhases();
    this.timeline.set(this.marks, data.evals, this.line);
    const peak = data.series.memory_bytes ? Math.max(...data.series.memory_bytes.mean.filter((v) => v !== null), 0) : 0;
    this.slots.planned.replaceChildren(plannedCard(this.comparison));
    const memory = memoryCard(data.last, data.planned["memory.bytes"], peak, "w4");
    this.slots.memory.replaceChildren(...(memory ? [memory] : []));
    this.drawFigures(this.slots.gpu, GPU);
    this.drawFigures(this.slots.host, HOST);
  }

  drawPhases() {
    const names = Object.keys(this.data.phases).filter((name) => name !== "total");
    const total = this.data.phases.total;
    if (!names.length) { this.phaseCard.hidden = true; return; }
    const order = [...names].sort((one, other) => mean(this.data.phases[one]) - mean(this.data.phases[other])).reverse();
    const columns = [];
    let below = this.data.x.map(() => 0);
    for (const name of order) { below = below.map((value, at) => value + (this.data.phases[name][at] || 0)); columns.push(below); }
    if (total) columns.push(total.map((value, at) => Math.max(value || 0, below[at])));
    const labels = total ? [...order, "between"] : order;
    if (!this.phases || this.phases.labels !== labels.join()) {
      if (this.phases) { this.phases.destroy(); this.charts = this.charts.filter((one) => one !== this.phases); }
      const dyes = Object.fromEntries(["forward", "backward", "optimizer", "reduce", "data", "wait", "weight gradients"].map((name, at) => [name, ["sky", "indigo", "teal", "ochre", "madder", "stone", "plum"][at]]));
      this.phases = this.chart({
        label: "Seconds of a step by part", text: secs, range: () => [0, this.phaseTop || 1],
        series: labels.map((name, at) => ({ label: name, dye: name === "between" ? "stone" : dyes[name] || dye(at), width: 1, tell: (row) => { const raw = this.rawPhase(name, row); return raw === null ? "" : secs(raw); } })),
        bands: labels.map((name, at) => (at ? [at + 1, at, name === "between" ? "stone" : dyes[name] || dye(at), 55] : null)).filter(Boolean),
      });
      this.phases.spec.series[0].fill = 55;
      this.phases.labels = labels.join();
      this.phaseBox.replaceChildren(this.phases.el);
    }
    // The first step of a start, which compiles, would flatten all others.
    const tops = [...columns[columns.length - 1]].sort((one, other) => one - other);
    this.phaseTop = Math.min(tops[tops.length - 1], tops[Math.floor(tops.length * 0.95)] * 1.4) * 1.05;
    this.phases.set([this.data.x, ...columns]);
  }

  rawPhase(name, row) {
    const { phases } = this.data;
    if (name !== "between") return phases[name] ? phases[name][row] : null;
    return Math.max(0, (phases.total[row] || 0) - Object.entries(phases).reduce((sum, [one, column]) => sum + (one === "total" ? 0 : column[row] || 0), 0));
  }

  drawFigures(slot, wanted) {
    for (const [name, title, text] of wanted) {
      const found = this.data.figures[name];
      if (!found || found.step.length < 2) continue;
      const last = this.data.last[name];
      const spread = last[3] ? `least ${text(last[0])} (${last[3]}), most ${text(last[2])} (${last[4]})` : "";
      let made = this.small.get(name);
      if (!made) {
        const chart = this.chart({ label: title, height: 110, text, plain: true, bands: [[3, 2, "teal", 18]], series: [{ label: "mean", dye: "teal" }, { label: "least", dye: "teal", quiet: true }, { label: "most", dye: "teal", quiet: true }] });
        made = { chart, el: card("w3", title, text(last[1]), chart.el, h("p", { className: "read" })) };
        this.small.set(name, made);
        slot.append(made.el);
      }
      made.el.querySelector(".note").textContent = text(last[1]);
      made.el.querySelector(".read").textContent = spread;
      made.chart.set([found.step, found.mean, found.low, found.high]);
    }
  }

  setMarks(marks) {
    this.marks = [...marks, ...((this.data && this.data.bad) || []).map((step) => ({ id: `bad${step}`, kind: "not finite", step, time: null, level: "critical", text: "the loss is not finite" }))];
    const kinds = [...new Set(this.marks.map((mark) => mark.kind))];
    this.kindBox.replaceChildren(...kinds.map((kind) => this.toggle(kind, this.kinds.has(kind), (on) => { if (on) this.kinds.add(kind); else this.kinds.delete(kind); this.drawEvents(); })));
    this.drawEvents();
  }

  drawEvents() {
    this.timeline.set(this.marks, this.data ? this.data.evals : null, this.line);
    const shown = this.marks.filter((mark) => !this.kinds.size || this.kinds.has(mark.kind)).reverse().slice(0, 300);
    this.eventsBox.replaceChildren(...shown.map((mark) => h("li", { className: mark.level },
      h("time", mark.time ? { datetime: new Date(mark.time * 1000).toISOString(), title: new Date(mark.time * 1000).toLocaleString() } : {}, mark.time ? clock(mark.time) : `step ${mark.step}`),
      h("span", { className: "kind" }, mark.kind),
      h("span", { className: "text" }, mark.step !== null && mark.time ? `step ${num(mark.step, 9)}: ` : "", mark.text))));
    if (!shown.length) this.eventsBox.append(h("li", {}, h("span", { className: "text" }, "Nothing yet.")));
  }

  drawConfig() {
    const entries = Object.entries(this.config);
    if (!entries.length) return;
    const body = h("tbody"), search = h("input", { className: "search", type: "search", placeholder: "Find a setting", "aria-label": "Find a setting" });
    const file = (name) => name.startsWith("profile: ") ? `/api/profile?${new URLSearchParams({ id: this.id, name: name.slice(9) })}` : "";
    const fill = () => body.replaceChildren(...entries.filter(([name, value]) => `${name} ${value}`.toLowerCase().includes(search.value.toLowerCase())).map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, h("code", {}, name)), h("td", {}, h("code", {}, file(name) ? h("a", { href: file(name) }, value) : value)))));
    search.addEventListener("input", fill);
    fill();
    this.slots.config.replaceChildren(card("", "Config", `${entries.length} settings, versions and places`, h("div", { className: "tall scroll", tabindex: 0 }, h("table", {}, body)), { tools: search }));
  }

  restyle() { for (const chart of this.charts) chart.rebuild(); this.heat.draw(); }
  destroy() { for (const chart of this.charts) chart.destroy(); }
}

const mean = (values) => values.reduce((sum, value) => sum + (value || 0), 0) / (values.length || 1);

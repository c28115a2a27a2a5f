// The goodput ledger, and the plan and what was measured.
import { bytes, card, h, num, percent, secs, signed } from "./dom.js";

export const CAUSE_DYE = {
  productive: "teal", start: "sky", compile: "plum", data: "ochre", evaluation: "indigo", tracing: "plum", checkpoint: "moss",
  "lost work": "madder", held: "stone", restart: "madder", other: "stone",
};
const MEANING = {
  productive: "steps whose work is in the weights", start: "from a start to its first step", compile: "the slow first step",
  data: "steps waited for batches", evaluation: "evaluations", tracing: "looking where a step went wrong", checkpoint: "training waited for saves",
  "lost work": "steps that were done again", held: "paused, until it was resumed", restart: "from a failure to the next start",
  other: "Python between steps, samples",
};

export function stack(seconds, className = "stack") {
  const total = Object.values(seconds).reduce((sum, one) => sum + Math.max(0, one), 0) || 1;
  return h("div", { className, "aria-hidden": "true" }, ...Object.entries(seconds).filter(([, value]) => value > 0).map(([cause, value]) =>
    h("i", { title: `${cause}: ${secs(value)}`, style: { flex: `${value / total} 0 0`, background: `var(--${CAUSE_DYE[cause] || "stone"})`, opacity: cause === "restart" || cause === "other" ? ".55" : "1" } })));
}

export function ledgerRows(ledger) {
  const rows = Object.entries(ledger.seconds).filter(([, value]) => value > 0.0005);
  const energy = ledger.energy && ledger.energy.kwh !== null ? (cause) => (cause in ledger.energy.kwh_by_cause ? watthours(ledger.energy.kwh_by_cause[cause]) : "unmeasured") : null;
  const money = ledger.cost ? (value) => `${((ledger.cost.total * value) / (ledger.wall_s || 1)).toFixed(2)} ${ledger.cost.currency}` : null;
  return h("div", { className: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Cause"), h("th", { scope: "col", className: "wide-only" }, ""), h("th", { className: "n", scope: "col" }, "Time"), h("th", { className: "n", scope: "col" }, "Share"), energy ? h("th", { className: "n", scope: "col" }, "Energy") : null, money ? h("th", { className: "n", scope: "col" }, "Cost") : null)),
    h("tbody", {}, ...rows.map(([cause, value]) => h("tr", {},
      h("td", {}, h("span", { className: "dot", style: { background: `var(--${CAUSE_DYE[cause] || "stone"})`, opacity: cause === "restart" || cause === "other" ? ".55" : "1" } }), cause),
      h("td", { className: "wide-only note" }, MEANING[cause] || ""),
      h("td", { className: "n" }, secs(value)),
      h("td", { className: "n" }, percent(value / (ledger.wall_s || 1))),
      energy ? h("td", { className: "n" }, energy(cause)) : null,
      money ? h("td", { className: "n" }, money(value)) : null)))));
}

export function watthours(kwh) {
  const [size, unit] = kwh >= 1e3 ? [1e3, "MWh"] : kwh >= 1 ? [1, "kWh"] : kwh >= 1e-3 ? [1e-3, "Wh"] : [1e-6, "mWh"];
  return `${num(kwh / size, 3)} ${unit}`;
}

function energyWords(energy) {
  if (!energy) return [];
  if (energy.kwh === null) return ["energy unmeasured"];
  const words = [`${watthours(energy.kwh)} (${energy.label})`];
  if (energy.j_per_item !== null) words.push(`${num(energy.j_per_item, 3)} J per item`);
  if (energy.cost !== null) words.push(`${num(energy.cost, 3)} ${energy.currency}`);
  if (energy.co2_g !== null) words.push(`${energy.co2_g >= 1000 ? `${num(energy.co2_g / 1000, 3)} kg` : `${num(energy.co2_g, 3)} g`} CO2`);
  return words;
}

export function ledgerCard(ledger, width = "w6") {
  const words = [`${percent(ledger.share)} of ${secs(ledger.wall_s)} made steps that count`];
  if (ledger.failures) words.push(`${ledger.failures} failure${ledger.failures > 1 ? "s" : ""}`);
  if (ledger.starts > 1) words.push(`${ledger.starts} starts`);
  if (ledger.cost) words.push(`${ledger.cost.total.toFixed(2)} ${ledger.cost.currency}`);
  words.push(...energyWords(ledger.energy));
  const notes = ledger.energy && ledger.energy.notes.length ? h("p", { className: "note" }, ledger.energy.notes.join(" · ")) : null;
  return card(width, "Goodput", words.join(" · "), stack(ledger.seconds), ledgerRows(ledger), notes);
}

function pair(name, planned, actual, text, whole) {
  const most = Math.max(planned || 0, actual || 0, planned ? 0 : whole || 0) || 1;
  const off = planned && actual ? actual / planned - 1 : null;
  return h("div", { className: "pair" },
    h("span", {}, name),
    h("span", { className: "two", "aria-hidden": "true" },
      h("i", { style: { width: `${(100 * (planned || 0)) / most}%`, background: "var(--stone)" } }),
      h("i", { style: { width: `${(100 * (actual || 0)) / most}%`, background: off !== null && Math.abs(off) > 0.15 ? "var(--madder)" : "var(--indigo)" } })),
    h("span", { className: `off ${off !== null && off > 0.15 ? "down" : ""}` }, off === null ? "–" : signed(off)),
    h("span", { className: "figs" }, planned ? `planned ${text(planned)}, measured ${text(actual)}` : `measured ${text(actual)}`));
}

export function plannedCard(found, width = "w6") {
  const names = [...new Set([...Object.keys(found.planned), ...Object.keys(found.actual)])];
  const step = found.step_s, memory = found.memory_bytes;
  if (!step[0] && !memory[0]) {
    const why = found.unknown || "nothing is known of this machine: run weft calibrate once, and the planner tells what to expect";
    if (!names.length) return card(width, "Plan and measurement", null, h("p", { className: "empty" }, why));
  }
  const rows = [pair("step", step[0], step[1], secs), ...names.map((name) => pair(name, found.planned[name], found.actual[name], secs, step[1])), pair("memory", memory[0], memory[1], bytes)];
  const drift = (found.drift || []).length ? h("p", { className: "read down" }, found.drift.join(" ")) : null;
  return card(width, "Plan and measurement", found.basis ? `expected from ${found.basis}` : found.unknown, drift, ...rows);
}

export function memoryCard(last, planned, peak, width = "w6") {
  const classes = Object.entries(last).filter(([name]) => name.startsWith("memory.bytes{")).map(([name, value]) => [name.slice(13, -1), value]);
  const shown = classes.filter(([name]) => name !== "peak");
  const most = (classes.find(([name]) => name === "peak") || [null, null])[1];
  const top = Math.max(most ? most[2] : 0, peak || 0, planned || 0, shown.reduce((sum, [, value]) => sum + value[2], 0));
  if (!top) return null;
  const dyes = { weights: "indigo", gradients: "ochre", optimizer: "teal", rest: "stone", activations: "plum" };
  const total = shown.reduce((sum, [, value]) => sum + value[2], 0);
  return card(width, "Memory", `largest rank: peak ${bytes(most ? most[2] : peak)}${planned ? `, planned ${bytes(planned)}` : ""}`,
    shown.length ? h("div", { className: "stack", "aria-hidden": "true" }, ...shown.map(([name, value]) => h("i", { style: { flex: `${value[2] / top} 0 0`, background: `var(--${dyes[name] || "sky"})` } })), h("i", { style: { flex: `${Math.max(0, 1 - total / top)} 0 0` } })) : null,
    h("table", {}, h("tbody", {}, ...shown.map(([name, value]) => h("tr", {},
      h("td", {}, h("span", { className: "dot", style: { background: `var(--${dyes[name] || "sky"})` } }), name),
      h("td", { className: "n" }, bytes(value[1])), h("td", { className: "n wide-only" }, value[4] && value[2] > value[1] * 1.01 ? `most: ${bytes(value[2])}, ${value[4]}` : "equal on all ranks"))),
      ...(most || !peak ? [] : [h("tr", {}, h("td", {}, "first rank, peak of the process"), h("td", { className: "n" }, bytes(peak)))]),
      ...(planned ? [h("tr", {}, h("td", {}, "planned"), h("td", { className: "n" }, bytes(planned)), h("td", { className: "wide-only" }))] : []))));
}

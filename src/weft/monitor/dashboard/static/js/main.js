// Which page is shown, and what it hears.
import { get, listen } from "./api.js";
import { ComparePage } from "./compare_page.js";
import { h } from "./dom.js";
import { RunPage } from "./run_page.js";
import { ShelfPage } from "./shelf_page.js";

const main = document.getElementById("main"), crumbs = document.getElementById("crumbs"), link = document.getElementById("link");
const lines = new Map();
let page = null, shelf = null;

function parts() { return location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(decodeURIComponent); }

async function show() {
  const [kind, ...ids] = parts();
  if (page) page.destroy();
  const here = [h("a", { href: "#/" }, shelf.root)];
  if (shelf.one) page = new RunPage([...lines.keys()][0]);
  else if (kind === "run" && ids.length) { page = new RunPage(ids.join("/")); here.push(" / ", h("b", {}, ids.join("/"))); }
  else if (kind === "compare" && ids.length > 1) { page = new ComparePage(ids); here.push(" / ", h("b", {}, ids.join(", "))); }
  else { page = new ShelfPage(shelf.root, [...lines.values()]); document.title = `Weft: ${shelf.root}`; }
  crumbs.replaceChildren(...(shelf.one ? [] : here));
  main.replaceChildren(page.el);
  scrollTo(0, 0);
  const mine = page;
  if (!(mine instanceof ShelfPage)) for (const line of lines.values()) if (mine.ids ? mine.ids.includes(line.id) : mine.id === line.id) mine.update(line);
  try { await mine.load(); document.body.dataset.ready = "yes"; }
  catch (error) { main.replaceChildren(h("p", { className: "empty" }, error.message, " ", h("a", { href: "#/" }, "All runs"))); }
}

function heard(changed) {
  for (const line of changed) {
    lines.set(line.id, line);
    if (page instanceof RunPage ? page.id === line.id : page) page.update(line);
  }
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("weft-theme", root.dataset.theme); } catch (_) { /* a browser without storage */ }
  if (page) page.restyle();
});
addEventListener("hashchange", show);

shelf = await get("runs");
for (const line of shelf.runs) lines.set(line.id, line);
await show();
listen(heard, (state) => { link.className = `link ${state}`; link.textContent = state === "live" ? "live" : "server away, trying again"; });

// Before the first paint: no flash of the other theme.
(function () {
  let kept = null;
  try { kept = localStorage.getItem("weft-theme"); } catch (_) { /* a browser without storage */ }
  const dark = kept ? kept === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();

// Runs before the first paint, so that the page never flashes in the wrong colours.
(() => {
  const saved = localStorage.getItem("theme");
  if (saved === "light" || saved === "dark") document.documentElement.dataset.theme = saved;
})();

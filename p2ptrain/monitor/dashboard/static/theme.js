// Before anything is drawn, so that no page of the wrong colour flashes up.
(() => {
  const saved = localStorage.getItem("theme");
  if (saved === "light" || saved === "dark") document.documentElement.dataset.theme = saved;
})();

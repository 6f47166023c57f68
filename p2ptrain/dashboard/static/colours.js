// One colour for each peer, told apart by everyone as far as eight go (after Okabe and Ito), then spread over the hues.

const LIGHT = ["#0072b2", "#c44e00", "#00805d", "#b0478a", "#2f86c0", "#9a6a00", "#4d4d4d", "#6f57a8"];
const DARK = ["#56aee8", "#ff9057", "#3fcb9f", "#e79bca", "#9bd3f5", "#efbb45", "#cfcfcf", "#bba3ea"];

export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function colour(n) {
  const palette = isDark() ? DARK : LIGHT;
  if (n <= palette.length) return palette[n - 1];
  const hue = (n * 137.508) % 360;
  return `hsl(${hue.toFixed(0)} ${isDark() ? "62% 68%" : "68% 38%"})`;
}

export const token = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function onThemeChange(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  document.addEventListener("themechange", redraw);
}

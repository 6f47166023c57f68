// One colour per peer: eight that colour-blind people can tell apart (after Okabe and Ito), then a spread of hues.

const LIGHT = ["#0072b2", "#c44e00", "#00805d", "#b0478a", "#8f6a00", "#6f57a8", "#4d4d4d", "#2f8fb0"];
const DARK = ["#56aee8", "#ff9057", "#3fcb9f", "#e79bca", "#efbb45", "#bba3ea", "#cfcfcf", "#8fd6ea"];

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

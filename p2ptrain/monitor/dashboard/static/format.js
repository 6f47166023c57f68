// Format numbers, sizes and times for people.

const whole = new Intl.NumberFormat("en");

export const integer = (value) => whole.format(value);

export const decimal = (value, digits) => (value == null ? "–" : value.toFixed(digits));

export function size(bytes) {
  let value = bytes, unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB"]) {
    if (value < 999.5) break;
    value /= 1000;
    unit = larger;
  }
  return `${value < 9.95 && unit !== "B" ? value.toFixed(1) : value.toFixed(0)} ${unit}`;
}

export function compact(value) {
  if (value < 10000) return integer(value);
  return value < 999500 ? `${(value / 1000).toFixed(0)}k` : `${(value / 1e6).toFixed(1)}M`;
}

export const clock = (t) => new Date(t * 1000).toLocaleTimeString("en-GB");

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${Math.round(seconds / 3600)} h ago`;
}

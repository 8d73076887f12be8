// Numbers and times for the eye.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return String(value);
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

export const signed = (value) => (value === null || value === undefined ? "–" : (value > 0 ? "+" : "") + number(value));

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${number(seconds / 3600, 2)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export const thousands = (count) => count.toLocaleString("en-GB");

// Quantities in few characters.

import { language, t } from "./language.js";

const SIZES = ["B", "kB", "MB", "GB", "TB", "PB"];

// A number with that many decimals, as the page's language writes them.
export const fixed = (number, decimals) =>
  number.toLocaleString(language, { minimumFractionDigits: decimals, maximumFractionDigits: decimals, useGrouping: false });

function scaled(number, units) {
  let at = 0;
  for (; number >= 999.5 && at < units.length - 1; at++) number /= 1000;
  return `${fixed(number, at && number < 99.95 ? 1 : 0)} ${units[at]}`;
}

export const bytes = (count) => scaled(count, SIZES);
export const bitRate = (bytesPerSecond) => scaled(8 * bytesPerSecond, ["bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"]);
export const count = (number) => scaled(number, ["", "k", "M", "B", "T"]).trim();

export function ago(seconds) {
  const [, unit, name] = [[100, 1, "s"], [6000, 60, "min"], [172800, 3600, "h"], [Infinity, 86400, t("d")]].find(([one]) => seconds < one);
  return t("{time} ago", { time: `${Math.floor(seconds / unit)} ${name}` });
}

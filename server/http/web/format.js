// SPDX-License-Identifier: Apache-2.0
// Numbers for people; sizes as vramctl writes them.

const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

// "512 B", "1.50 KiB", "20.00 MiB".
export function bytes(value) {
  let unit = 0;
  let scaled = value;
  while (scaled >= 1024 && unit + 1 < UNITS.length) {
    scaled /= 1024;
    ++unit;
  }
  return unit === 0 ? `${value} B` : `${scaled.toFixed(2)} ${UNITS[unit]}`;
}

// For axes: "1.5 GiB", "512 MiB", "0".
export function shortBytes(value) {
  return value === 0 ? '0' : bytes(value).replace(/(\.\d*?)0+ /, '$1 ').replace('. ', ' ');
}

export const percent = (ratio) => `${(ratio * 100).toFixed(1)}%`;

// "3.1 s", "4 min", "2 h 05 min".
export function duration(ms) {
  const seconds = Math.max(0, ms) / 1000;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 90) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, '0')} min`;
}

// "00:05:09"; without h23 some languages write 24 for midnight.
const CLOCK = {hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23'};
export const clock = (date) => date.toLocaleTimeString([], CLOCK);
export const day = (date) => date.toLocaleDateString([], {day: 'numeric', month: 'short'});
// With its day, where that is not today.
export const moment = (date) => (day(date) === day(new Date()) ? clock(date) : `${day(date)} ${clock(date).slice(0, 5)}`);

export const plural = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

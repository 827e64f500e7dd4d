"use strict";
// Sorting by a click on a column's head, which the address keeps (#sort=table:column:direction), and showing or hiding
// the lines of a group.

function sort(table, column, direction) {
  const body = table.tBodies[0];
  const value = (row) => {
    const cell = row.cells[column];
    const number = cell.dataset.value;
    return number === undefined ? cell.textContent.trim().toLowerCase() : number === "" ? null : Number(number);
  };
  const compared = (a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return (x === null) - (y === null); // what is not known comes last
    return (x < y ? -1 : x > y ? 1 : 0) * (direction === "ascending" ? 1 : -1);
  };
  [...body.rows].sort(compared).forEach((row) => body.append(row));
  for (const head of table.tHead.rows[0].cells) head.removeAttribute("aria-sort");
  table.tHead.rows[0].cells[column].setAttribute("aria-sort", direction);
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const before = head.getAttribute("aria-sort") ?? head.dataset.worst;
      const direction = before === "ascending" ? "descending" : "ascending";
      sort(table, column, direction);
      history.replaceState(null, "", `#sort=${table.id}:${column}:${direction}`);
    });
  });
}

const wanted = /^#sort=([\w-]+):(\d+):(ascending|descending)$/.exec(location.hash);
const table = wanted && document.getElementById(wanted[1]);
if (table && table.tHead.rows[0].cells[wanted[2]]) sort(table, Number(wanted[2]), wanted[3]);

for (const label of document.querySelectorAll(".legend label")) {
  const input = label.querySelector("input");
  const lines = [...document.querySelectorAll("figure .group")];
  const own = (line) => line.dataset.group === input.value;
  const others = (line) => line.dataset.group.split("-")[0] === input.value.split("-")[0] && !own(line);
  const show = () => lines.filter(own).forEach((line) => line.classList.toggle("hidden", !input.checked));
  const fade = (on) => lines.filter(others).forEach((line) => line.classList.toggle("faded", on && input.checked));
  input.addEventListener("change", show);
  label.addEventListener("mouseenter", () => fade(true));
  label.addEventListener("mouseleave", () => fade(false));
  show(); // browsers keep what was chosen when a page is loaded again
}

addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));

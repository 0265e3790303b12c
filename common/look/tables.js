"use strict";
// Tables of class "sortable": a click on a column's button sorts them by it, as does #sort=COLUMN in the address.

function sortKey(cell) {
  return cell.dataset.value ?? cell.textContent.trim();
}

/** Numbers by size, then texts by the alphabet, then what is empty. */
function compare(a, b) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const [x, y] = [Number(a), Number(b)];
  if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a.localeCompare(b);
  return x - y;
}

function sortBy(table, header) {
  const column = header.cellIndex;
  const descending = header.ariaSort === "ascending";
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  header.ariaSort = descending ? "descending" : "ascending";
  const [body] = table.tBodies;
  const key = row => sortKey(row.cells[column]);
  const rows = [...body.rows].sort((a, b) => {
    if (key(a) === "" || key(b) === "") return compare(key(a), key(b)); // what is empty comes last either way
    return descending ? compare(key(b), key(a)) : compare(key(a), key(b));
  });
  body.append(...rows);
}

function sortAsAddressed() {
  const wanted = new URLSearchParams(location.hash.slice(1)).get("sort");
  for (const button of document.querySelectorAll(".sortable th button")) {
    const header = button.parentElement;
    if (button.textContent === wanted && header.ariaSort !== "ascending") sortBy(button.closest("table"), header);
  }
}

for (const table of document.querySelectorAll(".sortable")) {
  for (const button of table.tHead.querySelectorAll("button")) {
    button.addEventListener("click", () => sortBy(table, button.parentElement));
  }
}
addEventListener("hashchange", sortAsAddressed);
sortAsAddressed();

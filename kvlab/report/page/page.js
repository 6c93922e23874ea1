"use strict";
(function () {
  const root = document.documentElement;
  const said = document.getElementById("said");

  // Theme: what the system prefers, until the reader says otherwise.
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  function showTheme() {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
    button.setAttribute("aria-pressed", String(isDark()));
  }
  try {
    const kept = localStorage.getItem("kvlab-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch (error) { /* a page from a file may have no storage */ }
  document.getElementById("settings").hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("kvlab-theme", root.dataset.theme); } catch (error) { /* as above */ }
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // Selection: a design cell, in every table and figure at once.
  const picked = new Set();
  const keyed = new Map();
  for (const element of document.querySelectorAll("[data-key]")) {
    const key = element.dataset.key;
    if (!keyed.has(key)) keyed.set(key, []);
    keyed.get(key).push(element);
  }
  const names = new Map(); // key -> what it is called
  function pick(key) {
    if (!key) return;
    if (picked.has(key)) picked.delete(key); else picked.add(key);
    for (const element of keyed.get(key) || []) {
      element.classList.toggle("picked", picked.has(key));
      if (element.tagName !== "TR") continue;
      if (picked.has(key)) element.setAttribute("aria-current", "true");
      else element.removeAttribute("aria-current");
    }
    said.textContent = (picked.has(key) ? "Selected: " : "No longer selected: ") + names.get(key);
  }
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") [...picked].forEach(pick);
  });

  // Tables: sort by any column, filter where there is much, select rows.
  function valueOf(row, column) {
    const cell = row.cells[column];
    const value = cell.dataset.v;
    if (value === undefined) return cell.classList.contains("none") ? null : cell.textContent;
    return Number(value);
  }
  function compare(one, other) {
    if (typeof one === "number" && typeof other === "number") return one - other;
    return String(one).localeCompare(String(other), "en", { numeric: true });
  }
  function sort(table, head, column) {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
    rows.sort(([one], [other]) => {
      if (one === null || other === null) return (one === null) - (other === null);
      return down ? compare(other, one) : compare(one, other);
    });
    body.append(...rows.map(([, row]) => row));
  }
  function stops(table) { // one row that Tab comes to, among those that are shown
    const rows = [...table.tBodies[0].querySelectorAll("tr[data-key]")];
    const shown = rows.filter((row) => !row.hidden);
    if (shown.some((row) => row.tabIndex === 0)) return;
    for (const row of rows) row.tabIndex = -1;
    if (shown.length) shown[0].tabIndex = 0;
  }
  function addFilter(table, tools) {
    const rows = [...table.tBodies[0].rows];
    const input = document.createElement("input");
    const count = document.createElement("span");
    input.type = "search";
    input.placeholder = "Filter rows, such as: mqa rope";
    input.setAttribute("aria-label", "Filter: " + table.caption.textContent);
    input.setAttribute("aria-controls", table.id);
    count.setAttribute("role", "status");
    const texts = rows.map(
      (row) => [...row.cells].map((cell) => cell.textContent).join(" ").toLowerCase());
    function apply() {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      rows.forEach((row, index) => {
        row.hidden = !words.every((word) => texts[index].includes(word));
        if (!row.hidden) shown += 1;
      });
      count.textContent = words.length ? shown + " of " + rows.length + " rows" : "";
      stops(table);
    }
    input.addEventListener("input", apply);
    tools.append(input, count);
  }
  function addTools(table) {
    const box = table.parentNode;
    const tools = document.createElement("div");
    const more = document.createElement("span");
    tools.className = "tools";
    const filtered = table.tBodies[0].rows.length > 12;
    if (filtered) addFilter(table, tools);
    more.className = "more";
    more.textContent = "Scroll sideways for more columns \u2192";
    tools.append(more);
    box.before(tools);
    function look() {
      table.classList.remove("tight", "tighter");
      for (const step of ["tight", "tighter"])
        if (box.scrollWidth > box.clientWidth) table.classList.add(step);
      more.hidden = box.scrollWidth <= box.clientWidth;
      tools.hidden = !filtered && more.hidden;
    }
    new ResizeObserver(look).observe(box);
  }
  for (const table of document.querySelectorAll("table")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const name = document.createElement("button");
      name.type = "button";
      name.textContent = head.textContent;
      head.replaceChildren(name);
      head.setAttribute("aria-sort", "none");
      name.addEventListener("click", () => sort(table, head, column));
    });
    addTools(table);
    stops(table);
    for (const row of table.tBodies[0].querySelectorAll("tr[data-key]")) {
      if (!names.has(row.dataset.key)) names.set(row.dataset.key, row.cells[0].textContent);
    }
    table.tBodies[0].addEventListener("click", (event) => {
      const row = event.target.closest("tr[data-key]");
      if (row && !String(window.getSelection())) pick(row.dataset.key);
    });
    table.tBodies[0].addEventListener("keydown", (event) => {
      const row = event.target.closest("tr[data-key]");
      if (!row) return;
      if (event.key === "Enter" || event.key === " ") {
        event.preventDefault();
        pick(row.dataset.key);
      }
      const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
      if (!step) return;
      event.preventDefault();
      let next = row[step];
      while (next && next.hidden) next = next[step];
      if (next) { row.tabIndex = -1; next.tabIndex = 0; next.focus(); }
    });
  }

  // Marks of figures: a click selects the cell; their values are titles, which need no script.
  for (const mark of document.querySelectorAll("circle[data-key]")) {
    const name = mark.querySelector("title").textContent.split("\n")[0];
    if (!names.has(mark.dataset.key)) names.set(mark.dataset.key, name);
    mark.addEventListener("click", () => pick(mark.dataset.key));
  }

  // All folds at once, on a page that is printed and by the button.
  const folds = [...document.querySelectorAll("main details")].map((fold) => [fold, fold.name]);
  const foldButton = document.getElementById("folds");
  foldButton.hidden = !folds.length;
  let isUnfolded = false;
  function unfold(isOpen) {
    for (const [fold, name] of folds) {
      fold.name = isOpen ? "" : name; // of one name only one can be open
      fold.open = isOpen;
    }
  }
  foldButton.addEventListener("click", () => {
    isUnfolded = !isUnfolded;
    foldButton.textContent = isUnfolded ? "Fold all" : "Show all";
    foldButton.setAttribute("aria-pressed", String(isUnfolded));
    unfold(isUnfolded);
  });
  let before = [];
  window.addEventListener("beforeprint", () => {
    before = folds.map(([fold]) => fold.open);
    unfold(true);
  });
  window.addEventListener("afterprint", () => {
    unfold(isUnfolded);
    folds.forEach(([fold], index) => { fold.open = before[index]; });
  });

  // One fold is open at a time (they have one name). What is pressed stays where it is, although a
  // fold above it closes.
  document.addEventListener("click", (event) => {
    const summary = event.target.closest("summary");
    if (!summary) return;
    const before = summary.getBoundingClientRect().top;
    requestAnimationFrame(() => window.scrollBy(0, summary.getBoundingClientRect().top - before));
  });
})();

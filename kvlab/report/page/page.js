"use strict";
(function () {
  const root = document.documentElement;
  const tip = document.getElementById("tip");
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
  const plots = []; // figures that are drawn: each has show(), which redraws the selection
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
    for (const plot of plots) plot.select();
  }
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    tip.hidden = true;
    [...picked].forEach(pick);
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

  // Units of bytes: binary or decimal, in tables and on axes.
  const unitButton = document.getElementById("unit");
  let unit = "binary";
  function formatBytes(count, system) {
    const base = system === "binary" ? 1024 : 1000;
    const units = system === "binary" ? ["B", "KiB", "MiB", "GiB", "TiB"] : ["B", "kB", "MB", "GB", "TB"];
    let power = 0;
    while (power < 4 && count >= base) { count /= base; power += 1; }
    return Number(count.toPrecision(4)).toLocaleString("en", { maximumFractionDigits: 3 }) + " " + units[power];
  }
  const sized = [...document.querySelectorAll("[data-bytes]")];
  if (!sized.length) unitButton.hidden = true;
  unitButton.addEventListener("click", () => {
    unit = unit === "binary" ? "decimal" : "binary";
    unitButton.textContent = unit === "binary" ? "Show MB" : "Show MiB";
    unitButton.setAttribute("aria-pressed", String(unit === "decimal"));
    for (const cell of sized) cell.textContent = formatBytes(Number(cell.dataset.bytes), unit);
    for (const plot of plots) plot.set("units", unit);
  });

  // Figures: drawn by Vega when they come near the screen; until then the static image stands.
  function formatNumber(value, label) {
    return Math.abs(value) < 10000 || !/\d/.test(label) ? label.replace("-", "\u2212")
      : value.toLocaleString("en").replace("-", "\u2212");
  }
  function formatSpread(value) {
    const text = value >= 0.001 && value < 1e6 ? Number(value.toPrecision(2)).toLocaleString("en")
      : value.toExponential(0).replace("e+", "e").replace("e-", "e\u2212");
    return text;
  }
  // Ticks of a logarithmic axis: powers of its base, and parts of them where few are in sight.
  function powers([low, high], base) {
    const first = Math.floor(Math.log(low) / Math.log(base));
    const last = Math.ceil(Math.log(high) / Math.log(base));
    const ticks = [];
    const parts = last - first > 3 ? [1] : base === 2 ? [1, 1.25, 1.5, 1.75] : [1, 2, 5];
    for (let power = first; power <= last; power += 1) {
      for (const part of parts) ticks.push(part * base ** power);
    }
    return ticks.filter((tick) => tick >= low && tick <= high);
  }
  const expressionFunctions = {
    bytes: formatBytes, number: formatNumber, spread: formatSpread, powers,
  };

  // The library's own placement of labels: beside their marks, over nothing else.
  function addLabels(compiled) {
    const avoided = compiled.marks.map((mark) => mark.name).filter((name) => /^marks_/.test(name));
    const anchors = compiled.marks.find((mark) => mark.name === "anchors_marks");
    if (anchors) {
      anchors.interactive = false;
      compiled.marks.push({
        type: "text",
        from: { data: "anchors_marks" },
        interactive: false,
        encode: { enter: {
          text: { field: "datum.label" }, fontSize: { value: 11 }, fill: { value: "var(--ink)" },
          font: { value: "system-ui, sans-serif" },
        } },
        transform: [{
          type: "label", size: { signal: "[width, height]" }, avoidMarks: avoided,
          anchor: ["right", "top-right", "bottom-right", "top", "bottom", "top-left", "bottom-left", "left"],
          offset: [3, 8, 14, 22, 32],
        }],
      });
    }
    return compiled;
  }

  class Plot {
    constructor(figure, spec) {
      const box = document.createElement("div");
      this.place = document.createElement("div");
      this.place.className = "view";
      box.className = "plot";
      box.append(this.place);
      figure.querySelector(".static").after(box);
      this.points = [];
      for (const layer of spec.layer) {
        if (layer.name && layer.name.startsWith("marks_")) this.points.push(...layer.data.values);
      }
      this.keys = new Set(this.points.map((point) => point.key));
      for (const point of this.points) {
        if (point.key && !names.has(point.key)) names.set(point.key, point.tip.split("\n")[0]);
      }
      this.order = [...this.points].sort((one, other) => one.x - other.x || one.y - other.y);
      this.zoomed = spec.layer.find((layer) => layer.params).params[0].select.encodings;
      this.at = -1;
      this.place.addEventListener("keydown", (event) => this.key(event));
      this.place.addEventListener("blur", () => this.leave());
      this.addZoom(box);
      this.ready = this.draw(figure, spec);
    }
    async draw(figure, spec) {
      const options = {
        actions: false, ast: true, defaultStyle: false, expressionFunctions, patch: addLabels,
        renderer: "svg", tooltip: (handler, event, item, value) => this.hover(item, value),
      };
      this.view = (await vegaEmbed(this.place, spec, options)).view;
      this.view.addEventListener("click", (event, item) => {
        if (item && item.datum && item.datum.tip) pick(item.datum.key);
      });
      this.describe(figure.querySelector(".static").alt);
      figure.classList.add("drawn");
      this.view.signal("units", unit);
      plots.push(this);
      return this.select();
    }
    // An image that answers to keys, in words of the report's instead of the library's.
    describe(words) {
      this.place.tabIndex = 0;
      this.place.setAttribute("role", "application");
      this.place.setAttribute("aria-roledescription", "plot");
      this.place.setAttribute("aria-label", words);
      this.place.setAttribute("aria-describedby", "help-text");
      this.place.querySelector("svg").setAttribute("aria-hidden", "true");
    }
    set(name, value) { return this.view.signal(name, value).runAsync(); }
    select() { return this.set("picked", [...picked].filter((key) => this.keys.has(key))); }
    hover(item, value) {
      if (value && value.tip) this.tell(item.datum); else tip.hidden = true;
    }
    // Show a point's values above it.
    tell(point) {
      const box = this.place.querySelector("svg").getBoundingClientRect();
      const [[left, top], padding] = [this.view.origin(), this.view.padding()];
      const x = box.left + padding.left + left + this.view.scale("x")(point.x);
      const y = box.top + padding.top + top + this.view.scale("y")(point.y);
      tip.textContent = point.tip;
      tip.hidden = false;
      const room = tip.getBoundingClientRect();
      tip.style.left = Math.max(8, Math.min(x + 12, window.innerWidth - room.width - 8)) + "px";
      tip.style.top = (y - room.height - 10 > 0 ? y - room.height - 10 : y + 12) + "px";
    }
    leave() {
      this.at = -1;
      tip.hidden = true;
      this.set("at", -1);
    }
    go(index) {
      this.at = index;
      this.set("at", this.order[index].n);
      this.tell(this.order[index]);
    }
    key(event) {
      const count = this.order.length;
      if (event.key === "ArrowRight" && count) this.go((this.at + 1) % count);
      else if (event.key === "ArrowLeft" && count) this.go((this.at + count - (this.at < 0 ? 0 : 1)) % count);
      else if (event.key === "Enter" && this.at >= 0) pick(this.order[this.at].key);
      else if (event.key === "+" || event.key === "=") this.zoom(0.7);
      else if (event.key === "-") this.zoom(1 / 0.7);
      else if (event.key === "0") this.zoom(0);
      else return;
      event.preventDefault();
    }
    addZoom(box) {
      const bar = document.createElement("div");
      bar.className = "zoom";
      for (const [text, name, factor] of [["+", "Zoom in", 0.7], ["\u2212", "Zoom out", 1 / 0.7], ["Reset", "Reset the zoom", 0]]) {
        const one = document.createElement("button");
        one.type = "button";
        one.tabIndex = -1; // by keyboard: + - 0 on the plot itself
        one.textContent = text;
        one.setAttribute("aria-label", name);
        one.addEventListener("click", () => this.zoom(factor));
        bar.append(one);
      }
      box.append(bar);
    }
    // Scale the axes around their middle; 0 shows everything again.
    zoom(factor) {
      for (const axis of this.zoomed) {
        if (!factor) { this.view.signal("zoom_" + axis, null); continue; }
        const scale = this.view.scale(axis);
        const [start, end] = scale.range();
        const [middle, reach] = [(start + end) / 2, (factor * (end - start)) / 2];
        this.view.signal("zoom_" + axis, [scale.invert(middle - reach), scale.invert(middle + reach)]);
      }
      tip.hidden = true;
      return this.view.runAsync();
    }
  }

  const watcher = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting || entry.target.drawing) continue;
      const figure = entry.target;
      watcher.unobserve(figure);
      figure.drawing = true;
      figure.plot = new Plot(figure, JSON.parse(figure.querySelector("script").textContent));
    }
  }, { rootMargin: "800px" });
  if (window.vegaEmbed) for (const figure of document.querySelectorAll("figure")) watcher.observe(figure);

  // One fold is open at a time (they have one name). What is pressed stays where it is, although a
  // fold above it closes.
  document.addEventListener("click", (event) => {
    const summary = event.target.closest("summary");
    if (!summary) return;
    const before = summary.getBoundingClientRect().top;
    requestAnimationFrame(() => window.scrollBy(0, summary.getBoundingClientRect().top - before));
  });
  window.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
})();

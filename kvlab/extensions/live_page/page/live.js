"use strict";
(function () {
  const POLL = 2000; // milliseconds
  const STATES = ["done", "failed", "diverged", "pruned", "running", "missing"];
  const root = document.documentElement;
  const byId = (id) => document.getElementById(id);
  const select = byId("sweep");
  const state = { name: "", shown: "", isOver: null, reported: "" };

  // Theme: what the system prefers, until the reader says otherwise; reports keep the same choice.
  const button = byId("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  function showTheme() {
    button.textContent = isDark() ? "Light theme" : "Dark theme";
    button.setAttribute("aria-pressed", String(isDark()));
  }
  const kept = localStorage.getItem("kvlab-theme");
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("kvlab-theme", root.dataset.theme);
    showTheme();
    if (!byId("report").hidden) byId("report").contentWindow.location.reload();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  // Names of the record are untrusted: they only ever become text.
  function make(tag, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    return element;
  }
  function makeRow(cells) {
    const row = make("tr");
    row.append(...cells);
    return row;
  }
  function makeId(trial) {
    const cell = make("td");
    cell.append(make("code", trial.slice(0, 8)));
    return cell;
  }
  const count = (number) => Number(number).toLocaleString("en-US", { maximumFractionDigits: 0 });

  async function get(path) {
    const response = await fetch(path, { cache: "no-store" });
    if (!response.ok) throw new Error((await response.text()).trim());
    return response.json();
  }
  function report(problem) {
    byId("problem").hidden = !problem;
    byId("problem").textContent = problem;
  }

  function showSweeps(sweeps) {
    const options = sweeps.map((one) => {
      const note = one.driven ? " (running)" : one.states.damaged ? " (damaged)" : "";
      const option = make("option", one.sweep + note);
      option.value = one.sweep;
      return option;
    });
    const text = options.map((option) => option.textContent).join("\n");
    if (select.dataset.text !== text) {
      select.dataset.text = text;
      select.replaceChildren(...options);
    }
    if (!state.name || !sweeps.some((one) => one.sweep === state.name)) {
      const first = sweeps.find((one) => one.driven) || sweeps[sweeps.length - 1];
      if (first) choose(first.sweep, true);
    }
    select.value = state.name;
    byId("content").hidden = !sweeps.length;
    report(sweeps.length ? "" : "The store holds no sweep yet. `kvlab submit SWEEP` starts one; it shows here.");
  }

  function choose(name, isDefault) {
    if (name === state.name) return;
    Object.assign(state, { name, shown: "", isOver: null, reported: "" });
    byId("curves").replaceChildren();
    byId("report").hidden = true;
    const path = "/sweep/" + encodeURIComponent(name);
    if (location.pathname !== path) history[isDefault ? "replaceState" : "pushState"]({}, "", path);
  }
  function chooseByAddress() {
    const match = location.pathname.match(/^\/sweep\/([^/]+)$/);
    if (match) choose(decodeURIComponent(match[1]), true);
  }
  select.addEventListener("change", () => { choose(select.value, false); poll(); });
  window.addEventListener("popstate", () => { chooseByAddress(); poll(); });

  function showSweep(facts) {
    document.title = facts.sweep + ": kvlab";
    byId("title").textContent = facts.sweep;
    byId("question").textContent = facts.question;
    showBar(facts);
    const isOver = !facts.driven && !facts.states.missing && !facts.states.running;
    byId("summary").textContent = summarize(facts);
    byId("search").hidden = !facts.search.length;
    byId("search").replaceChildren(...facts.search.map((line) => make("li", line)));
    byId("running-part").hidden = !facts.running.length;
    byId("running").replaceChildren(...facts.running.map(makeRunningRow));
    // What is over has a report, which shows the rest.
    const ended = [...facts.failed, ...(isOver ? [] : facts.ended)];
    byId("ended-part").hidden = !ended.length;
    byId("ended-title").textContent = isOver ? "Failed" : "Ended last";
    byId("ended").replaceChildren(...ended.map(makeEndedRow));
    showCurves(isOver ? [] : facts.curves);
    showReport(facts, isOver);
  }

  function showBar(facts) {
    const parts = STATES.filter((name) => name !== "missing" && facts.states[name]).map((name) => {
      const part = make("span", undefined, name);
      part.style.flex = "0 0 " + (100 * facts.states[name]) / facts.total + "%";
      return part;
    });
    byId("bar").replaceChildren(...parts);
    byId("bar").setAttribute("aria-label", summarize(facts));
  }

  function summarize(facts) {
    const counts = STATES.filter((name) => facts.states[name]);
    const words = counts.map((name) => count(facts.states[name]) + " " + (name === "missing" ? "to run" : name));
    const parts = [count(facts.total) + " trials: " + (words.join(", ") || "none began")];
    if (facts.stage) parts.push("stage: " + facts.stage);
    if (facts.trials_per_hour) parts.push(Number(facts.trials_per_hour).toPrecision(3) + " trials an hour");
    if (facts.left) parts.push("about " + facts.left + " left");
    if (!facts.driven) parts.push(facts.states.missing ? "no driver runs it: submit it again to go on" : "it is over");
    return parts.join(" \u00b7 ");
  }

  function makeRunningRow(trial) {
    const progress = make("td");
    if (trial.steps) {
      const bar = make("progress");
      bar.max = trial.steps;
      bar.value = trial.step;
      progress.append(bar, count(trial.step) + " of " + count(trial.steps));
    }
    const rate = trial.tokens_per_second;
    return makeRow([
      makeId(trial.trial), make("td", trial.label, "wide"), make("td", trial.stage), progress,
      make("td", typeof trial.loss === "number" ? trial.loss.toFixed(4) : "", "n"),
      make("td", rate ? count(rate) : "", "n"), make("td", trial.left || "", "n"),
    ]);
  }
  function makeEndedRow(trial) {
    const tone = trial.state === "done" ? "good" : trial.state === "pruned" ? "" : "bad";
    const cells = [make("td", trial.label, "wide"), make("td", trial.state, tone), make("td", trial.detail, "wide")];
    return makeRow([makeId(trial.trial), ...cells]);
  }

  // Curves: an SVG of lines; a title on each point of validation shows its values on hovering.
  const WIDTH = 900, HEIGHT = 320, LEFT = 60, BOTTOM = 40;
  function draw(tag, attributes, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }
  function makeTicks(low, high) {
    const parts = [1, 2, 5, 10].map((part) => part * 10 ** Math.floor(Math.log10((high - low) / 5)));
    const step = parts.find((part) => (high - low) / part <= 6) || parts[3];
    const ticks = [];
    for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
    return ticks;
  }
  function showCurves(curves) {
    const text = JSON.stringify(curves);
    if (text === state.shown) return;
    state.shown = text;
    const trained = curves.flatMap((curve) => curve.train);
    const measured = curves.flatMap((curve) => curve.validation);
    byId("curves-part").hidden = !trained.length && !measured.length;
    if (byId("curves-part").hidden) return;
    // The first steps are far above what follows: the axis ends at the first validation.
    const losses = (measured.length > 1 ? measured : [...measured, ...trained]).map((point) => point[1]).filter(Number.isFinite);
    const room = 0.06 * (Math.max(...losses) - Math.min(...losses)) || 0.1;
    const low = Math.min(...losses) - room, high = Math.max(...losses) + room;
    const most = Math.max(...[...measured, ...trained].map((point) => point[0])) || 1;
    const x = (tokens) => LEFT + ((WIDTH - LEFT - 20) * tokens) / most;
    const y = (loss) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - 10) * (Math.min(loss, high) - low)) / (high - low);
    const svg = draw("svg", { viewBox: "0 0 " + WIDTH + " " + HEIGHT, role: "img", "aria-label": "loss curves" });
    for (const tick of makeTicks(low, high)) {
      svg.append(draw("path", { class: "grid", d: "M" + LEFT + " " + y(tick) + "H" + (WIDTH - 20) }),
        draw("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, Number(tick.toPrecision(6))));
    }
    for (const tick of makeTicks(0, most))
      svg.append(draw("text", { x: x(tick), y: HEIGHT - 22, "text-anchor": "middle" }, count(tick)));
    svg.append(draw("text", { x: WIDTH / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "training tokens"),
      draw("text", { transform: "translate(12 " + HEIGHT / 2 + ") rotate(-90)", "text-anchor": "middle" }, "loss (nats/token)"));
    const addLine = (points, color, width, opacity) => svg.append(draw("path", { fill: "none", stroke: color,
      "stroke-width": width, opacity, d: "M" + points.map(([tokens, loss]) => x(tokens) + " " + y(loss)).join("L") }));
    const legend = [];
    [...curves].sort((one, other) => one.is_running - other.is_running).forEach((curve) => {
      const color = curve.is_running ? "var(--c" + (legend.length % 8) + ")" : "var(--muted)";
      if (curve.is_running) {
        const entry = make("li", curve.label);
        entry.style.color = color;
        legend.push(entry);
      }
      if (curve.train.length) addLine(curve.train, color, 1, 0.35);
      if (curve.validation.length) addLine(curve.validation, color, curve.is_running ? 2 : 1, curve.is_running ? 1 : 0.5);
      for (const [tokens, loss] of curve.validation) {
        const mark = draw("circle", { cx: x(tokens), cy: y(loss), r: 3, fill: color, opacity: curve.is_running ? 1 : 0 });
        mark.append(draw("title", {}, curve.label + "\n" + count(tokens) + " tokens\nloss " + loss.toFixed(4)));
        svg.append(mark);
      }
    });
    const list = make("ul");
    list.append(...legend);
    byId("curves").replaceChildren(list, svg);
  }

  // The report is written when it is asked for: while a sweep runs, it takes time from the trials.
  function showReport(facts, isOver) {
    const path = "/report/" + encodeURIComponent(facts.sweep) + "/report.html";
    const ended = facts.total - (facts.states.missing || 0) - (facts.states.running || 0);
    byId("report-link").href = path;
    byId("report-part").hidden = !ended;
    byId("report-title").textContent = isOver ? "Report" : "Report so far";
    byId("show-report").textContent = byId("report").hidden ? "Show the report" : "Write it again";
    byId("show-report").hidden = isOver;
    const text = ended === facts.total ? "of all trials" : "of " + count(ended) + " of " + count(facts.total) + " trials";
    byId("report-state").textContent = state.reported && state.reported !== String(ended)
      ? count(ended - Number(state.reported)) + " trials have ended since" : text;
    state.ended = String(ended);
    if (isOver && state.isOver !== isOver) loadReport();
    state.isOver = isOver;
  }
  function loadReport() {
    byId("report").hidden = false;
    byId("report").src = byId("report-link").href;
    state.reported = state.ended;
  }
  byId("show-report").addEventListener("click", loadReport);

  let timer = 0;
  async function poll() {
    clearTimeout(timer);
    try {
      showSweeps(await get("/api/sweeps"));
      if (state.name) showSweep(await get("/api/sweep/" + encodeURIComponent(state.name)));
    } catch (error) {
      byId("content").hidden = !(error instanceof TypeError);
      report(error instanceof TypeError ? "The page's server does not answer: is `kvlab live` still running?" : error.message);
    }
    timer = setTimeout(poll, document.hidden ? 5 * POLL : POLL);
  }
  chooseByAddress();
  poll();
})();

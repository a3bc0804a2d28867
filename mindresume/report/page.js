// Makes the report interactive: both languages, light and dark, and charts with values, zoom and a legend. Without it
// the page has its tables. It reads the block "data" (page.py, texts.json), asks no network, and writes texts only as text,
// never as markup. plot.js stands before it in the same script.

const data = JSON.parse(document.getElementById("data").textContent);

// ---- texts, language, colours ---------------------------------------------------------------------------------------

let language = "en";
const marked = [...document.querySelectorAll("[data-t]")];
const relabel = [];                     // called after each change of the language

// Returns a text of the table; a value that is an array is a phrase itself (phrases.py does the same).
function say(key, values = {}) {
  const forms = data.texts[language][key].split("|");
  const form = values.count === 1 ? forms[0] : forms[forms.length - 1];
  return form.replace(/\{(\w+)\}/g, (_, name) => shown(values[name]));
}

function shown(value) {
  return Array.isArray(value) ? say(...value) : String(value);
}

function setLanguage(name) {
  language = name;
  document.documentElement.lang = name === "zh" ? "zh-CN" : "en";
  for (const one of marked) one.textContent = shown(JSON.parse(one.dataset.t));
  for (const write of relabel) write();
}

// Remembers a choice until the tab is closed; not at all where a browser forbids it.
function remember(name, value) {
  try {
    if (value) sessionStorage.setItem("mindresume-" + name, value);
    return sessionStorage.getItem("mindresume-" + name);
  } catch {
    return value;
  }
}

const system = matchMedia("(prefers-color-scheme: dark)");
const darkRule = [...document.styleSheets[0].cssRules].find((rule) => rule instanceof CSSMediaRule);
let colours = remember("colours");      // "dark", "light", or null: those of the system

function isDark() {
  return colours ? colours === "dark" : system.matches;
}

function setColours(name) {
  colours = name;
  if (name) darkRule.media.mediaText = name === "dark" ? "screen" : "not all";
  for (const write of relabel) write();
}

function button(label, action, attributes = {}) {
  const made = element("button", { type: "button", ...attributes });
  made.addEventListener("click", action);
  relabel.push(() => label(made));
  return made;
}

function addSwitches() {
  const languages = [["en", "English"], ["zh", "中文"]].map(([name, text]) => button((made) => {
    made.textContent = text;
    made.setAttribute("aria-pressed", language === name);
  }, () => { remember("language", name); setLanguage(name); }, { lang: name }));
  const group = element("span", { class: "group", role: "group" }, ...languages);
  relabel.push(() => group.setAttribute("aria-label", say("switch.language")));
  const theme = button((made) => {
    made.textContent = say(isDark() ? "switch.light" : "switch.dark");
    made.title = say("switch.theme");
  }, () => {
    const other = isDark() ? "light" : "dark";
    remember("colours", other);
    setColours(other);
  }, { id: "colours" });
  system.addEventListener("change", () => setColours(colours));
  const switches = document.getElementById("switches");
  switches.append(theme, group);
  switches.hidden = false;
}

// ---- the loss -------------------------------------------------------------------------------------------------------

const chart = data.chart;
const SHAPES = {
  committed: "M-3-3h6v6h-6z", staged: "M-3-3h6v6h-6z", memory: "M-1-3h2v6h-2z", resumed: "M-4-5l9 5l-9 5z",
  failed: "M-5-3l2-2l3 3l3-3l2 2l-3 3l3 3l-2 2l-3-3l-3 3l-2-2l3-3z", tick: "M-1-4h2v8h-2z",
};

function paintMark(mark, shape, at, x, y, inside, kind = mark.kind) {
  inside.append(element("path", { class: "mark " + kind, d: SHAPES[shape], transform: `translate(${x} ${y})` }));
  return { at, left: x, right: x, top: y, bottom: y, isMark: true, text: () => shown(mark.text) };
}

function paintLoss(plot, inside) {
  const items = [], curves = chart.curves.filter((curve) => !plot.hidden.has(curve.kind));
  const marks = chart.marks.filter((mark) => mark.step !== null && !plot.hidden.has(mark.kind) && plot.sees(mark.step));
  const isNear = ({ steps }, index) =>  // a line to this point may be visible
    (steps[index + 1] ?? steps[index]) >= plot.view[0] && (steps[index - 1] ?? steps[index]) <= plot.view[1];
  let [low, high, points] = [Infinity, -Infinity, 0];
  for (const isUsed of [(curve, index) => plot.sees(curve.steps[index]), isNear]) {
    for (const curve of low > high ? curves : []) {
      curve.values.forEach((value, index) => {
        if (value === null || !isUsed(curve, index)) return;
        [low, high, points] = [Math.min(low, value), Math.max(high, value), points + 1];
      });
    }
  }
  if (low > high) [low, high] = [0, 1];
  const edge = (high - low || Math.abs(high) || 1) * 0.06, floor = plot.depth - 30;       // the saves lie below
  const y = (value) => floor - (value - low + edge) / (high - low + 2 * edge) * (floor - 4);
  for (const tick of ticks(low - edge, high + edge, plot.depth / 55)) {
    inside.append(element("line", { class: "grid", x1: 0, x2: plot.inner, y1: y(tick), y2: y(tick) }));
    plot.svg.append(element("text", {
      class: "tick-y", x: MARGIN.left - 8, y: MARGIN.top + y(tick) + 4, "text-anchor": "end",
    }, number(tick)));
  }
  for (const [from, to] of plot.hidden.has("lost") ? [] : chart.areas) {
    if (to < plot.view[0] || from > plot.view[1]) continue;
    const width = Math.max(plot.x(to) - plot.x(from), 1);
    inside.append(element("rect", { class: "area", x: plot.x(from), width, y: 0, height: plot.depth }));
  }
  const paths = { kept: "", lost: "" };
  let pen = null;                       // the last point of the line that is drawn: {kind, step}
  for (const curve of curves) {
    if (curve.kind === "lost") pen = null;
    curve.steps.forEach((step, index) => {
      const value = curve.values[index];
      if (value === null || !isNear(curve, index)) {
        pen = null;
        return;
      }
      const [left, top] = [plot.x(step), y(value)], isOn = pen && pen.kind === curve.kind && pen.step < step;
      paths[curve.kind] += `${isOn ? "L" : "M"}${left.toFixed(2)} ${top.toFixed(2)}${isOn ? "" : "h0"}`;
      pen = { kind: curve.kind, step };
      if (!plot.sees(step)) return;
      const text = () => say(curve.kind === "kept" ? "tip.loss" : "tip.lost", {
        step, loss: value, attempt: curve.attempt, after: span(curve.times[index]),
      });
      items.push({ at: step, left, right: left, top, bottom: top, text });
    });
  }
  for (const kind of ["lost", "kept"]) inside.append(element("path", { class: "curve " + kind, d: paths[kind] }));
  for (const item of points <= 60 ? items : []) {
    inside.append(element("circle", { class: "mark sample", cx: item.left, cy: item.top, r: 2.8 }));
  }
  const few = marks.filter((mark) => mark.kind === "committed" || mark.kind === "staged").length <= 60;
  const failures = marks.filter((mark) => mark.kind === "failed").length;
  for (const mark of marks) {
    const isSave = mark.kind === "committed" || mark.kind === "staged", x = plot.x(mark.step);
    const top = mark.loss === null ? plot.depth - (isSave ? 7 : mark.kind === "memory" ? 18 : 26) : y(mark.loss);
    items.push(paintMark(mark, isSave && !few ? "tick" : mark.kind, mark.step, x, top, inside));
    if (mark.kind === "failed" && failures <= 30) {
      inside.append(element("text", { class: "number", x: x + 7, y: top - 6 }, mark.attempt));
    }
  }
  return items;
}

// ---- the timeline ---------------------------------------------------------------------------------------------------

const UNITS = [["chart.d", 86400, 2 * 86400], ["chart.h", 3600, 7200], ["chart.min", 60, 120], ["chart.s", 1, 0]];
const SERIES = {
  startup: "startup", shutdown: "startup", productive: "productive", lost: "lost_time", downtime: "downtime", idle: "downtime",
  unknown: "unknown",
};

function paintTimeline(plot, inside) {
  const items = [];
  const bar = (kind, from, to, top, bottom, text) => {
    const left = plot.x(from), right = plot.x(to);
    if (right < 0 || left > plot.inner) return;
    inside.append(element("rect", { class: kind, x: left, width: Math.max(right - left, 0.5), y: top, height: bottom - top }));
    items.push({ left: Math.max(left, 0), right: Math.min(right, plot.inner), top, bottom, text });
  };
  for (const [kind, attempt, from, to] of chart.spans) {
    if (plot.hidden.has(SERIES[kind])) continue;
    bar("k-" + kind, from, to, 8, 48, () => say("tip.span", {
      kind: ["spent." + kind], span: span(to - from), attempt, begin: span(from),
    }));
  }
  for (const [kind, attempt, from, to, phase, lasted] of plot.hidden.has("recovery") ? [] : chart.phases) {
    bar(kind, from, to, 54, 66, () => say("tip.recovery", { phase, span: lasted, attempt }));
  }
  for (const mark of chart.marks) {
    const isFailure = mark.kind === "failed";
    if (mark.at === null || !plot.sees(mark.at) || plot.hidden.has(isFailure ? "failures" : "saves")) continue;
    const [shape, y, kind] = isFailure ? ["failed", 8, "failed"] : ["tick", 48, "committed"];
    items.push(paintMark(mark, shape, mark.at, plot.x(mark.at), y, inside, kind));
  }
  return items;
}

// ---- the page -------------------------------------------------------------------------------------------------------

function addCharts() {
  const place = document.getElementById("charts");
  const line = (key) => element("path", { class: "curve " + key, d: "M2 6h16" });
  const shape = (kind, name = kind) => element("path", { class: "mark " + kind, d: SHAPES[name], transform: "translate(10 6)" });
  const block = (key) => element("rect", { class: key, width: 18, height: 10, x: 1, y: 1 });
  const steps = [...chart.curves.flatMap((curve) => [curve.steps[0], curve.steps[curve.steps.length - 1]]),
    ...chart.marks.map((mark) => mark.step).filter((step) => step !== null)];
  if (steps.length) {
    const [first, last] = [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))];
    const edge = Math.max((last - first) * 0.015, 0.5), full = [first - edge, last + edge];
    const kinds = new Set([...chart.curves, ...chart.marks.filter((mark) => mark.step !== null)].map((one) => one.kind));
    const series = ["kept", "lost", "committed", "staged", "memory", "resumed", "failed"].filter((key) => kinds.has(key));
    new Plot(place, {
      title: "loss", full, least: Math.min(2, full[1] - full[0]), height: 380, paint: paintLoss, unit: 1,
      axis: () => ({ size: 1, name: "chart.step" }),
      series: series.map((key) => ({ key, swatch: SHAPES[key] ? shape(key) : line(key) })),
    });
  }
  if (chart.length > 0) {
    const used = new Set(chart.spans.map(([kind]) => SERIES[kind]));
    const kinds = chart.marks.filter((mark) => mark.at !== null).map((mark) => mark.kind);
    const series = ["startup", "productive", "lost", "downtime", "unknown"].filter((kind) => used.has(SERIES[kind]))
      .map((kind) => ({ key: SERIES[kind], swatch: block("k-" + kind) }));
    if (chart.phases.length) series.push({ key: "recovery", swatch: block("p-compile") });
    if (kinds.some((kind) => kind !== "failed")) series.push({ key: "saves", swatch: shape("committed", "tick") });
    if (kinds.includes("failed")) series.push({ key: "failures", swatch: shape("failed") });
    new Plot(place, {
      title: "timeline", full: [-0.006 * chart.length, 1.006 * chart.length], least: Math.min(0.01, chart.length), series,
      height: chart.phases.length ? 126 : 108, paint: paintTimeline,
      axis: (length) => {
        const [name, size] = UNITS.find(([, , least]) => length >= least);
        return { name, size };
      },
    });
  }
  const notes = [["help", {}], ["left_out", chart.losses], ["marks_left_out", chart.saves],
    ["attempts_left_out", chart.attempts]];
  for (const [name, counts] of notes) {
    if (name !== "help" && counts.shown >= counts.total) continue;
    const note = place.appendChild(element("p", { class: "help", "data-note": name }));
    const values = Object.fromEntries(Object.entries(counts).map(([key, value]) => [key, number(value)]));
    relabel.push(() => { note.textContent = say("chart." + name, values); });
  }
  place.hidden = false;
  document.getElementById("no-charts").hidden = true;
}

// Shows the phases in the bars of the recoveries: one under the pointer, all with the keyboard.
function addBars() {
  for (const bar of document.querySelectorAll("svg.parts")) {
    const titles = new Map([...bar.children].map((part) => [part, part.querySelector("title")]));
    for (const title of titles.values()) title.remove();  // the browser would show its own box as well
    bar.setAttribute("tabindex", 0);
    const all = () => [...titles.values()].map((title) => title.textContent);
    relabel.push(() => bar.setAttribute("aria-label", all().join("; ")));
    const point = (event) => {
      const title = titles.get(event.target);
      if (title) showTip([title.textContent], event.clientX, event.clientY);
    };
    bar.addEventListener("pointermove", point);
    bar.addEventListener("pointerdown", point);
    bar.addEventListener("pointerleave", hideTip);
    bar.addEventListener("focus", () => {
      const box = bar.getBoundingClientRect();
      if (bar.matches(":focus-visible")) showTip(all(), box.left, box.top);
    });
    bar.addEventListener("blur", hideTip);
  }
}

document.body.append(tip);
addEventListener("scroll", hideTip, { passive: true });
addSwitches();
if (chart) addCharts();
addBars();
if (colours) setColours(colours);
setLanguage(remember("language") || (navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en"));

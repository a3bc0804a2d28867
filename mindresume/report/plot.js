"use strict";
// Draws a chart of the report that can be zoomed, moved and asked for values (class Plot). page.js follows in the same script,
// and has the texts (say, relabel) and the buttons.

const SVG = new Set(["svg", "g", "path", "rect", "line", "circle", "text"]);
const MARGIN = { left: 56, right: 14, top: 12, bottom: 40 };

// Returns a new element. Children are elements or texts.
function element(name, attributes = {}, ...children) {
  const made = SVG.has(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// ---- the box with values --------------------------------------------------------------------------------------------

const tip = element("div", { class: "tip", role: "status" });
tip.hidden = true;

function showTip(lines, x, y) {
  tip.replaceChildren(...lines.map((line) => element("p", {}, line)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 14 + width < innerWidth ? x + 14 : x - 14 - width;
  tip.style.left = Math.max(4, Math.min(left, innerWidth - width - 4)) + "px";
  tip.style.top = Math.max(4, y - height - 12 > 4 ? y - height - 12 : Math.min(y + 16, innerHeight - height - 4)) + "px";
}

function hideTip() {
  tip.hidden = true;
  tip.replaceChildren();
}

// ---- a chart --------------------------------------------------------------------------------------------------------

// Draws one chart whose x axis can be zoomed and moved. `paint(plot, inside)` draws the content and returns what can be pointed
// at: {left, right, top, bottom} in pixels of the inside, `at`: its value of the axis if it is one, `isMark`, and `text()`.
class Plot {
  constructor(parent, { title, unit, full, least, height, series, paint, axis }) {
    Object.assign(this, { title, full, least, height, paint, axis, unit, view: full, hidden: new Set(), items: [], drag: null });
    this.svg = element("svg", { class: "plot", role: "application", tabindex: 0, height, id: "plot-" + title });
    const heading = element("h3");
    relabel.push(() => {
      heading.textContent = say("chart." + title);
      this.svg.setAttribute("aria-label", say("chart." + title));
    });
    const actions = [["zoom_in", "+", () => this.zoom(0.5)], ["zoom_out", "−", () => this.zoom(2)],
      ["left", "←", () => this.move(-0.25)], ["right", "→", () => this.move(0.25)], ["all", "", () => this.reset()]];
    const tools = actions.map(([name, sign, action]) => button((made) => {
      made.textContent = sign || say("chart." + name);
      made.title = say("chart." + name);
      made.setAttribute("aria-label", say("chart." + name));
    }, action, { "data-tool": name }));
    const legend = element("div", { class: "legend" }, ...series.map((one) => this.entry(one)));
    parent.append(element("section", { class: "chart" }, element("div", { class: "head" }, heading,
      element("span", { class: "group" }, ...tools)), this.svg, legend));
    this.listen();
    relabel.push(() => this.draw());
    new ResizeObserver(() => { if (this.svg.clientWidth !== this.width) this.draw(); }).observe(this.svg);
  }

  // Returns the button of the legend that switches a series on and off.
  entry({ key, swatch }) {
    const text = element("span");
    const made = button(() => { text.textContent = say("series." + key); }, () => {
      if (!this.hidden.delete(key)) this.hidden.add(key);
      made.setAttribute("aria-pressed", !this.hidden.has(key));
      this.draw();
    }, { "aria-pressed": "true", "data-series": key });
    made.append(element("svg", { width: 20, height: 12, "aria-hidden": "true" }, swatch), text);
    return made;
  }

  x(value) {
    return (value - this.view[0]) / (this.view[1] - this.view[0]) * this.inner;
  }

  at(x) {
    return this.view[0] + x / this.inner * (this.view[1] - this.view[0]);
  }

  sees(value) {
    return value >= this.view[0] && value <= this.view[1];
  }

  setView(from, to) {
    const [first, last] = this.full;
    const length = Math.min(Math.max(to - from, this.least), last - first);
    const begin = Math.min(Math.max((from + to - length) / 2, first), last - length);
    this.view = [begin, begin + length];
    this.draw();
  }

  zoom(factor, centre = (this.view[0] + this.view[1]) / 2) {
    this.setView(centre - (centre - this.view[0]) * factor, centre + (this.view[1] - centre) * factor);
  }

  move(share) {
    const shift = (this.view[1] - this.view[0]) * share;
    const [first, last] = this.full;
    const bounded = Math.min(Math.max(shift, first - this.view[0]), last - this.view[1]);
    this.setView(this.view[0] + bounded, this.view[1] + bounded);
  }

  reset() {
    this.view = this.full;
    this.draw();
  }

  draw() {
    this.width = this.svg.clientWidth;
    this.inner = Math.max(this.width - MARGIN.left - MARGIN.right, 50);
    this.depth = this.height - MARGIN.top - MARGIN.bottom;
    Object.assign(this.svg.dataset, { from: this.view[0], to: this.view[1] });
    const inside = element("svg", { x: MARGIN.left, y: MARGIN.top, width: this.inner, height: this.depth, class: "inside" });
    this.svg.replaceChildren();
    const { size, name } = this.axis(this.view[1] - this.view[0]);
    const below = this.height - MARGIN.bottom;
    for (const tick of ticks(this.view[0] / size, this.view[1] / size, this.inner / 90, this.unit)) {
      const x = MARGIN.left + this.x(tick * size), label = number(tick);
      const anchor = x + 4 * label.length > this.width ? "end" : "middle";
      this.svg.append(element("line", { class: "axis", x1: x, x2: x, y1: below, y2: below + 4 }),
        element("text", { class: "tick", x, y: below + 17, "text-anchor": anchor }, label));
    }
    const title = { class: "title", x: MARGIN.left + this.inner / 2, y: this.height - 5, "text-anchor": "middle" };
    this.svg.append(element("text", title, say(name)),
      element("line", { class: "axis", x1: MARGIN.left, x2: this.width - MARGIN.right, y1: below, y2: below }), inside);
    this.items = this.paint(this, inside);
    this.pointer = inside.appendChild(element("g"));
    this.chosen = null;
    hideTip();
  }

  // Shows the values of an item, and of all others at the same value of the axis.
  choose(item) {
    const middle = (one) => (one.left + one.right) / 2;
    const same = this.items.filter((one) => one !== item && one.at !== undefined && one.at === item.at);
    const lines = [item, ...same.slice(0, 4)].map((one) => one.text());
    if (same.length > 4) lines.push(say("tip.more", { count: same.length - 4 }));
    const x = middle(item), y = (item.top + item.bottom) / 2, box = this.svg.getBoundingClientRect();
    if (item.left === item.right) {
      this.pointer.replaceChildren(element("line", { class: "cursor", x1: x, x2: x, y1: 0, y2: this.depth }),
        element("circle", { class: item.isMark ? "ring" : "dot", cx: x, cy: y, r: item.isMark ? 9 : 4.5 }));
    } else {
      const size = { x: item.left, width: item.right - item.left, y: item.top - 2, height: item.bottom - item.top + 4 };
      this.pointer.replaceChildren(element("rect", { class: "ring", ...size }));
    }
    this.chosen = item;
    showTip(lines, box.left + MARGIN.left + Math.min(Math.max(x, 0), this.inner), box.top + MARGIN.top + y);
  }

  // Shows what is nearest to a place; a mark is easier to hit than a point of a curve.
  hover(x, y) {
    const outside = (value, from, to) => Math.max(from - value, 0, value - to);
    let best = null, least = Infinity;
    for (const item of this.items) {
      const far = outside(x, item.left, item.right) + 0.3 * outside(y, item.top, item.bottom) - (item.isMark ? 5 : 0);
      if (far < least) [best, least] = [item, far];
    }
    if (best) this.choose(best);
  }

  // Shows the next item in a direction, for the keyboard.
  next(direction, marksOnly) {
    const middle = (one) => (one.left + one.right) / 2;
    const from = this.chosen ? middle(this.chosen) : direction > 0 ? -1 : this.inner + 1;
    const far = (one) => (middle(one) - from) * direction, isInside = (one) => middle(one) >= 0 && middle(one) <= this.inner;
    const coming = this.items.filter((one) => far(one) > 0.5 && isInside(one) && (one.isMark || !marksOnly));
    if (coming.length) this.choose(coming.reduce((best, one) => far(one) < far(best) ? one : best));
  }

  listen() {
    const place = (event) => {
      const box = this.svg.getBoundingClientRect();
      return [event.clientX - box.left - MARGIN.left, event.clientY - box.top - MARGIN.top];
    };
    const on = (name, action) => this.svg.addEventListener(name, action, { passive: false });
    on("pointerdown", (event) => {
      if (event.button || event.pointerType === "touch") return;
      this.drag = { from: place(event)[0], view: this.view, isMove: event.shiftKey };
      this.svg.setPointerCapture(event.pointerId);
    });
    on("pointermove", (event) => {
      const [x, y] = place(event), drag = this.drag;
      if (!drag) {
        this.hover(x, y);
      } else if (drag.isMove) {
        this.view = drag.view;
        this.move((drag.from - x) / this.inner);
      } else {
        hideTip();
        const [from, to] = [drag.from, x].map((one) => Math.min(Math.max(one, 0), this.inner)).sort((a, b) => a - b);
        const size = { x: from, width: to - from, y: 0, height: this.depth };
        this.pointer.replaceChildren(element("rect", { class: "selection", ...size }));
      }
    });
    on("pointerup", (event) => {
      const drag = this.drag, x = place(event)[0];
      this.drag = null;
      if (drag && !drag.isMove && Math.abs(x - drag.from) > 6) {
        const ends = [this.at(Math.max(Math.min(drag.from, x), 0)), this.at(Math.min(Math.max(drag.from, x), this.inner))];
        this.setView(...ends);
      } else {
        this.hover(...place(event));
      }
    });
    on("pointercancel", () => { this.drag = null; });
    on("pointerleave", () => { if (!this.drag) this.leave(); });
    on("blur", () => this.leave());
    on("dblclick", () => this.reset());
    on("wheel", (event) => {
      const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
      if (!event.ctrlKey && !sideways) return;            // the page scrolls
      event.preventDefault();
      if (event.ctrlKey) this.zoom(Math.exp(event.deltaY / 200), this.at(place(event)[0]));
      else this.move((event.deltaX || event.deltaY) / this.inner);
    });
    const keys = {
      ArrowLeft: (event) => event.shiftKey ? this.move(-0.25) : this.next(-1),
      ArrowRight: (event) => event.shiftKey ? this.move(0.25) : this.next(1),
      PageUp: () => this.next(-1, true), PageDown: () => this.next(1, true), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
      "-": () => this.zoom(2), Escape: () => { this.drag = null; this.reset(); },
    };
    on("keydown", (event) => {
      if (!Object.hasOwn(keys, event.key) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key](event);
    });
  }

  leave() {
    this.pointer.replaceChildren();
    this.chosen = null;
    hideTip();
  }
}

// Returns round numbers between two values: about `count` of them, multiples of 1, 2 or 5 times a power of ten, at least `unit`.
function ticks(from, to, count, unit = 0) {
  const rough = Math.max((to - from) / Math.max(count, 2), 1e-12), power = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max([1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough), unit);
  const found = [];
  for (let index = Math.ceil(from / step); index * step <= to && found.length < 100; index++) found.push(index * step);
  return found;
}

function number(value) {
  return Number(value.toPrecision(12)).toLocaleString("en-US", { maximumFractionDigits: 10 });
}

// Returns a duration as a phrase, as phrases.duration does.
function span(seconds) {
  const whole = Math.round(seconds), two = (value) => String(Math.floor(value)).padStart(2, "0");
  const text = (unit, first, second = "") => ["span." + unit, { first: String(first), second: String(second) }];
  if (seconds < 10) return text("s", Math.max(seconds, 0).toFixed(seconds < 1 ? 2 : 1));
  if (whole < 60) return text("s", whole);
  if (whole < 3600) return text("min", Math.floor(whole / 60), two(whole % 60));
  if (whole < 86400) return text("h", Math.floor(whole / 3600), two(whole % 3600 / 60));
  return text("d", Math.floor(whole / 86400), Math.floor(whole % 86400 / 3600));
}

"use strict";
// Draws the curves of runs.html from the JSON in it. What is chosen stands in the address: #x=seconds&smooth=10&log=1

const runs = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("controls");
const CLOCKS = { seconds: "time/step_s", tokens: "data/tokens", epochs: "data/epoch" };
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 14, 8, 20]; // pixels around the lines of a chart
const FEW = 30; // points, which are marked each

// --- what is to be drawn ---

function curveOf(run, metric) {
  return Object.hasOwn(run.curves, metric) ? run.curves[metric] : null;
}

/** Where a run stands at a step, on the x axis that is chosen; null if it has not recorded that. */
function clockOf(run) {
  if (form.x.value === "step") return step => step;
  const curve = curveOf(run, CLOCKS[form.x.value]);
  if (!curve) return null;
  const records = curve.count / curve.values.length; // that stand behind one point
  const steps = [curve.steps[0] - 1, ...curve.steps];
  const reached = [0, ...curve.values];
  if (form.x.value !== "epochs") {
    for (let i = 1; i < reached.length; i++) reached[i] = reached[i - 1] + reached[i] * records;
  }
  return step => {
    const next = steps.findIndex(other => other >= step);
    if (next < 1) return reached.at(next); // before the first, or after the last
    const share = (step - steps[next - 1]) / (steps[next] - steps[next - 1]);
    return reached[next - 1] + share * (reached[next] - reached[next - 1]);
  };
}

/** Means over the points within so many steps around each. */
function smoothed(steps, values, window) {
  let [from, to] = [0, 0];
  return steps.map(step => {
    while (to < steps.length && steps[to] < step + window / 2) to++;
    while (steps[from] <= step - window / 2) from++;
    return values.slice(from, to).reduce((sum, value) => sum + value) / (to - from);
  });
}

/** A series for each metric of a panel in each run that is ticked. */
function seriesOf(metrics) {
  const ticked = new FormData(form).getAll("run").map(Number);
  return ticked.flatMap(index => {
    const [run, clock] = [runs[index], clockOf(runs[index])];
    const shown = metrics.filter(metric => clock && curveOf(run, metric));
    return shown.map(metric => {
      const curve = curveOf(run, metric);
      const mean = smoothed(curve.steps, curve.values, Number(form.smooth.value));
      const inside = run.events.filter(({ step }) => curve.steps[0] <= step && step <= curve.steps.at(-1));
      const events = inside.map(event => ({ ...event, x: clock(event.step) }));
      const second = metrics.indexOf(metric) > 0;
      return { ...curve, index, metric, second, name: run.name, x: curve.steps.map(clock), mean, events };
    });
  });
}

/** Of a run's colour: as in runs.html. */
function hueOf(index) {
  return (210 + index * 137.5) % 360;
}

// --- axes ---

/** {at: number -> pixel, ticks} of an axis that holds these numbers; null if there are none. */
function axis(numbers, start, end, logarithmic) {
  const usable = numbers.filter(x => Number.isFinite(x) && (!logarithmic || x > 0));
  if (!usable.length) return null;
  const turn = logarithmic ? Math.log10 : x => x;
  let low = turn(usable.reduce((a, b) => Math.min(a, b)));
  let high = turn(usable.reduce((a, b) => Math.max(a, b)));
  if (low === high) [low, high] = [low - (Math.abs(low) / 2 || 1), high + (Math.abs(high) / 2 || 1)];
  const at = x => start + ((turn(x) - low) / (high - low)) * (end - start);
  if (!logarithmic) return { at, ticks: ticks(low, high) };
  return { at, ticks: high - low > 1.5 ? ticks(low, high).map(x => 10 ** x) : ticks(10 ** low, 10 ** high) };
}

/** Three to seven round numbers in a range. */
function ticks(low, high) {
  const power = 10 ** Math.floor(Math.log10((high - low) / 3));
  const step = [5, 2, 1].map(x => x * power).find(x => (high - low) / x >= 3) ?? power;
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
}

function short(x) {
  const size = Math.abs(x);
  if (size >= 1e4 && size < 1e9) return size < 1e6 ? `${short(x / 1e3)}k` : `${short(x / 1e6)}M`;
  return size >= 1e9 || (size && size < 1e-3) ? x.toExponential(1) : String(Number(x.toPrecision(4)));
}

// --- drawing ---

function add(parent, name, attributes, text = "") {
  const element = document.createElementNS(parent.namespaceURI, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

function path(points) {
  let pen = "M";
  let drawn = "";
  for (const [x, y] of points) {
    const there = Number.isFinite(y); // a logarithm has no place for 0
    if (there) drawn += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = there ? "L" : "M";
  }
  return drawn;
}

function drawSeries(svg, series, up) {
  const group = add(svg, "g", { style: `--hue: ${hueOf(series.index)}` });
  const points = values => values.map((value, i) => [series.pixels[i], up.at(value)]);
  if (series.low) add(group, "path", { class: "band", d: path([...points(series.high), ...points(series.low).reverse()]) });
  else add(group, "path", { class: "raw", d: path(points(series.values)) });
  add(group, "path", { class: series.second ? "second" : "mean", d: path(points(series.mean)) });
  for (const [x, y] of series.x.length < FEW ? points(series.values) : []) {
    if (Number.isFinite(y)) add(group, "circle", { cx: x, cy: y, r: 2 });
  }
  for (const { pixel } of series.events) {
    add(group, "line", { class: "event", x1: pixel, x2: pixel, y1: TOP, y2: svg.clientHeight - BOTTOM });
  }
}

function draw(figure) {
  const svg = figure.querySelector("svg");
  const [width, height] = [svg.clientWidth, svg.clientHeight];
  svg.replaceChildren();
  if (figure.closest("details:not([open])")) return;
  const series = seriesOf(JSON.parse(figure.dataset.metrics));
  const across = axis(series.flatMap(s => s.x), LEFT, width - RIGHT, false);
  const heights = series.flatMap(s => [...s.values, ...(s.low ?? []), ...(s.high ?? [])]);
  const up = axis(heights, height - BOTTOM, TOP, form.log.checked);
  figure.series = [];
  if (!across || !up) return void add(svg, "text", { x: LEFT, y: height / 2 }, "nothing to draw on these axes");
  for (const tick of up.ticks) {
    add(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: up.at(tick), y2: up.at(tick) });
    add(svg, "text", { x: LEFT - 6, y: up.at(tick) + 4, "text-anchor": "end" }, short(tick));
  }
  for (const tick of across.ticks) {
    add(svg, "text", { x: across.at(tick), y: height - 4, "text-anchor": "middle" }, short(tick));
  }
  for (const one of series) {
    one.pixels = one.x.map(across.at);
    one.events = one.events.map(event => ({ ...event, pixel: across.at(event.x) }));
    drawSeries(svg, one, up);
  }
  figure.series = series;
}

// --- values under the pointer ---

function nearest(pixels, x) {
  return pixels.reduce((best, pixel, i) => (Math.abs(pixel - x) < Math.abs(pixels[best] - x) ? i : best), 0);
}

function tell(box, index, text) {
  const line = document.createElement("div");
  line.className = "run";
  line.style.setProperty("--hue", hueOf(index));
  line.textContent = text;
  box.append(line);
}

function point(figure, x) {
  const [svg, box] = [figure.querySelector("svg"), figure.querySelector(".values")];
  leave(figure);
  if (!figure.series?.length) return;
  const closest = figure.series.map(s => s.pixels[nearest(s.pixels, x)]);
  const cursor = closest[nearest(closest, x)];
  add(svg, "line", { class: "cursor", x1: cursor, x2: cursor, y1: TOP, y2: svg.clientHeight - BOTTOM });
  for (const s of figure.series) {
    const i = nearest(s.pixels, cursor);
    const range = s.low ? ` (${short(s.low[i])} to ${short(s.high[i])})` : "";
    const label = figure.series.some(other => other.second) ? ` ${s.metric}` : "";
    tell(box, s.index, `${short(s.values[i])}${range}${label} at step ${s.steps[i]}: ${s.name}`);
    for (const event of s.events) {
      if (Math.abs(event.pixel - cursor) < 6) tell(box, s.index, `${event.name} at step ${event.step}: ${s.name}`);
    }
  }
  box.style.setProperty(cursor > svg.clientWidth / 2 ? "left" : "right", "0");
  box.hidden = false;
}

function leave(figure) {
  figure.querySelector(".cursor")?.remove();
  figure.querySelector(".values").replaceChildren();
  figure.querySelector(".values").removeAttribute("style");
  figure.querySelector(".values").hidden = true;
}

// --- the page ---

function choose() {
  const chosen = new URLSearchParams(location.hash.slice(1));
  for (const field of form.elements) {
    if (!chosen.has(field.name)) continue;
    if (field.type === "checkbox") field.checked = chosen.getAll(field.name).includes(field.value);
    else field.value = chosen.get(field.name);
  }
}

function redraw() {
  form.querySelector("output").textContent = form.smooth.value === "1" ? "off" : `over ${form.smooth.value} steps`;
  document.querySelectorAll("figure").forEach(draw);
}

const longest = Math.max(1, ...runs.flatMap(run => Object.values(run.curves).map(curve => curve.steps.at(-1))));
form.smooth.max = Math.ceil(longest / 2);
form.smooth.value = Math.ceil(longest / 20);
choose();
redraw();
form.addEventListener("input", () => {
  history.replaceState(null, "", `#${new URLSearchParams(new FormData(form))}`);
  redraw();
});
for (const fold of document.querySelectorAll("details")) fold.addEventListener("toggle", redraw);
const resized = new ResizeObserver(entries => entries.forEach(entry => draw(entry.target)));
for (const figure of document.querySelectorAll("figure")) {
  resized.observe(figure);
  const svg = figure.querySelector("svg");
  svg.addEventListener("pointermove", event => point(figure, event.clientX - svg.getBoundingClientRect().left));
  svg.addEventListener("pointerleave", () => leave(figure));
}

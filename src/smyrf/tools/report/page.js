"use strict";
// Draws what page.py has written into #data. Colours follow the page, which follows the reader's light or dark mode.
const report = JSON.parse(document.getElementById("data").textContent);
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const families = { Dense: "dense", Smyrf: "smyrf", Tangent: "tangent", tuned: "tuned" };

function family(name) {
  return colour(families[name.split(",")[0]] || "soft");
}

function themed(chart, traces) {
  const ink = colour("ink"), line = colour("line");
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  const layout = structuredClone(chart.layout);
  for (const name of ["xaxis", "yaxis"]) {
    layout[name] = { ...axis, ...layout[name] };
    layout[name].title.standoff = 12;
  }
  Object.assign(layout, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, size: 12 },
    margin: { l: 50, r: 10, t: 10, b: 45 }, hovermode: "closest", legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hoverlabel: { bgcolor: colour("card"), font: { color: ink } },
  });
  const data = structuredClone(traces);
  for (const trace of data) {
    if (!trace.meta) continue;
    const own = family(trace.meta);
    trace.line = { ...trace.line, color: own };
    trace.marker = { size: 9, ...trace.marker, color: own };
  }
  return [data, layout];
}

function draw(chart) {
  const place = document.getElementById(chart.id);
  const select = place.parentElement.querySelector("select");
  const traces = select ? chart.choices[select.selectedIndex].data : chart.data;
  const [data, layout] = themed(chart, traces);
  return Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
}

const shades = (cluster, of) => `hsl(${Math.round((360 * cluster) / of)} 70% 55% / ${0.32})`;

function element(name, attributes = {}, ...inside) {
  const made = document.createElement(name);
  Object.assign(made, attributes);
  made.append(...inside);
  return made;
}

function percent(x) {
  return `${(100 * x).toFixed(x < 0.0995 ? 1 : 0)}%`;
}

function answer(view, number, place) {
  const reach = view.reaches[number];
  const most = Math.max(...reach.strongest.map((one) => Math.max(one.dense, one.approximate)), 1e-9);
  const rows = reach.strongest.map((one) => {
    const bars = ["dense", "approximate"].map((kind) => {
      const bar = element("span", { className: `bar ${kind}` });
      bar.style.width = `${(5 * one[kind]) / most}rem`;
      return element("div", {}, bar, ` ${percent(one[kind])}`);
    });
    const cell = element("td", {}, ...bars);
    return element("tr", {}, element("td", {}, one.text.trim() || "␣"), cell, element("td", {}, one.how));
  });
  const where = reach.cluster < 0 ? "is in no cluster" : `is in cluster ${reach.cluster + 1} of ${view.n_clusters}`;
  const folded = reach.folded > 0.0005 ? `, ${percent(reach.folded)} of its weight goes to far keys` : "";
  place.replaceChildren(
    element("p", {}, element("strong", {}, view.tokens[number].trim() || "␣"), ` ${where}, visits ${reach.n_met} of ${view.n_tokens} keys, which hold ${percent(reach.captured)} of the exact weight${folded}.`),
    element("table", {}, element("tbody", {}, ...rows)),
    element("p", { className: "note" }, "Its strongest keys. Upper bar: exact weight, lower bar: what the method gives."),
  );
}

function showTokens() {
  const section = document.getElementById("tokens");
  if (!section) return;
  const select = section.querySelector("select"), text = section.querySelector(".tokens"), side = section.querySelector(".answer");
  const view = report.views[select.selectedIndex];
  const spans = view.tokens.map((token, number) => {
    const span = element("span", { textContent: token, tabIndex: 0 });
    span.dataset.number = number;
    const cluster = view.reaches[number].cluster;
    if (cluster >= 0) span.style.background = shades(cluster, view.n_clusters);
    return span;
  });
  text.replaceChildren(...spans);
  text.classList.remove("asked");
  side.replaceChildren(element("p", { className: "note" }, "Point at a token, or tap it: the keys that it visits stay bright."));
  const ask = (event) => {
    const number = event.target.dataset && event.target.dataset.number;
    if (number === undefined) return;
    const keys = new Set(view.reaches[number].keys);
    text.classList.add("asked");
    spans.forEach((span, i) => {
      span.classList.toggle("met", keys.has(i));
      span.classList.toggle("asks", i === Number(number));
    });
    answer(view, Number(number), side);
  };
  for (const kind of ["onpointerover", "onclick", "onkeyup"]) text[kind] = ask; // a tab moves on by its key
  text.onpointerleave = () => text.classList.remove("asked");
}

function drawAll() {
  return Promise.all(report.charts.map(draw));
}

for (const select of document.querySelectorAll(".chart select")) {
  select.onchange = () => draw(report.charts.find((chart) => chart.id === select.dataset.chart));
}
const views = document.querySelector("#tokens select");
if (views) views.onchange = showTokens;
showTokens();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
drawAll().then(() => { document.documentElement.dataset.drawn = report.charts.length; });

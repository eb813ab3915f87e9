// Drawing: elements, lines, bars and heat maps. Text only ever becomes text nodes, so names from anywhere are harmless.
"use strict";

const charts = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 300, HEIGHT = 44;

  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function drawn(name, attributes = {}) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // A line over the last `seconds`; a value of null, or a pause of the data, breaks it.
  function path(times, values, top, now, seconds) {
    let text = "", area = "", before = null, start = 0;
    const close = () => { if (before !== null) area += `L${before.toFixed(1)} ${HEIGHT}L${start.toFixed(1)} ${HEIGHT}Z`; before = null; };
    let last = 0;
    for (let place = 0; place < times.length; place += 1) {
      const value = values[place], x = WIDTH * (1 - (now - times[place]) / seconds);
      if (value === null || value === undefined || x < 0) { close(); continue; }
      if (before !== null && times[place] - last > 4) close();
      const y = HEIGHT - 2 - (HEIGHT - 4) * Math.min(1, value / top);
      const step = `${before === null ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
      if (before === null) start = x;
      text += step; area += step; before = x; last = times[place];
    }
    close();
    return { text, area };
  }

  // lines: up to two arrays of values, the first with its area filled, the second dashed.
  function spark(svg, times, lines, now, seconds, label) {
    const top = Math.max(1e-9, ...lines.flat().filter((value) => value !== null && value !== undefined)) * 1.08;
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
    svg.replaceChildren(drawn("line", { x1: 0, x2: WIDTH, y1: HEIGHT - .5, y2: HEIGHT - .5 }));
    lines.forEach((values, place) => {
      const { text, area } = path(times, values, top, now, seconds);
      if (place === 0) svg.append(drawn("path", { d: area, class: "area" }));
      svg.append(drawn("path", { d: text, class: place ? "second" : "first" }));
    });
  }

  function bar(part) {
    const fill = element("i");
    fill.style.width = `${(100 * Math.max(0, Math.min(1, part))).toFixed(1)}%`;
    return element("div", { class: "bar", "aria-hidden": "true" }, fill);
  }

  // One hue whose lightness alone tells the amount, from the card's own ground to full contrast with it.
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const LIGHT = [[242, 246, 247], [180, 217, 214], [86, 170, 165], [14, 110, 110], [6, 58, 66]];
  const DARK = [[24, 33, 41], [24, 70, 78], [24, 130, 132], [79, 195, 189], [225, 250, 235]];
  const TOP = 400; // percent of the layer's mean that has the last colour
  function colour(percent) {
    const stops = dark.matches ? DARK : LIGHT;
    const at = Math.min(.9999, percent / TOP) ** .6 * (stops.length - 1);
    const low = stops[Math.floor(at)], high = stops[Math.floor(at) + 1], part = at - Math.floor(at);
    return low.map((value, place) => Math.round(value + (high[place] - value) * part));
  }

  function heat(canvas, map) {
    const wide = map.experts, high = map.layers, context = canvas.getContext("2d");
    canvas.width = wide; canvas.height = high;
    const image = context.createImageData(wide, high);
    map.percent.forEach((percent, place) => image.data.set([...colour(percent), 255], 4 * place));
    context.putImageData(image, 0, 0);
    canvas.style.height = `${Math.max(60, Math.min(420, high * 9))}px`;
  }

  function scale(canvas) {
    const context = canvas.getContext("2d");
    canvas.width = 100; canvas.height = 1;
    const image = context.createImageData(100, 1);
    for (let at = 0; at < 100; at += 1) image.data.set([...colour(TOP * at / 99), 255], 4 * at);
    context.putImageData(image, 0, 0);
  }

  return { element, drawn, spark, bar, heat, scale, dark, TOP };
})();

"use strict";
// The token view. All text is set as text, never as markup.
(function () {
  const block = document.getElementById("traces");
  const answersBox = document.getElementById("token-answers");
  if (!block || !answersBox) return;
  const data = JSON.parse(block.textContent);
  const pick = (id) => document.getElementById(id);
  const questionBox = pick("token-question"), colourBox = pick("token-colour"), moduleBox = pick("token-module");
  const details = pick("token-details"), legend = pick("token-legend"), promptBox = pick("token-prompt");
  const names = { base: "Base", adapter: "LoRA", gated: "Gated" };
  const PURPLE = "123,77,160", ORANGE = "214,118,20", BLUE = "47,120,190";
  const colours = {
    gates: "gate coefficient λ", entropy: "entropy", delta_entropy: "ΔH, LoRA − base", log_prob: "log-probability",
  };

  function element(tag, text, className) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  }
  function option(box, value, text) {
    const made = element("option", text);
    made.value = value;
    box.append(made);
  }
  const shown = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));

  // {label: indices of modules that are averaged}
  const groups = [["all modules, mean", data.modules.map((_, index) => index)]];
  const parts = data.modules.map((path) => ({ layer: (path.match(/\.(\d+)\./) || [])[1], kind: path.split(".").pop() }));
  for (const [key, name] of [["kind", (v) => v + ", mean over layers"], ["layer", (v) => "layer " + v + ", mean"]]) {
    for (const value of new Set(parts.map((part) => part[key]))) {
      if (value === undefined) continue;
      groups.push([name(value), parts.flatMap((part, index) => (part[key] === value ? [index] : []))]);
    }
  }
  data.modules.forEach((path, index) => groups.push([path, [index]]));

  function decoded(answer) {
    if (answer.gates && !answer.bytes) {
      const text = atob(answer.gates);
      answer.bytes = Uint8Array.from(text, (character) => character.charCodeAt(0));
    }
    return answer.bytes;
  }
  function lambdaAt(answer, position, indices) {
    const bytes = decoded(answer);
    if (!bytes) return null;
    let sum = 0;
    for (const index of indices) sum += bytes[index * answer.tokens.length + position];
    return data.lower + ((data.upper - data.lower) * sum) / (255 * indices.length);
  }
  function valueAt(answer, position) {
    if (colourBox.value === "gates") return lambdaAt(answer, position, groups[moduleBox.selectedIndex][1]);
    const values = answer[colourBox.value];
    return values ? values[position] : null;
  }
  function tint(value) {
    if (value === null || value === undefined) return "";
    let share, colour;
    if (colourBox.value === "gates") {
      [share, colour] = value >= 1
        ? [data.upper > 1 ? (value - 1) / (data.upper - 1) : 0, ORANGE]
        : [(1 - value) / (1 - data.lower), PURPLE];
    } else if (colourBox.value === "delta_entropy") {
      [share, colour] = [Math.min(Math.abs(value) / 2, 1), value > 0 ? ORANGE : PURPLE];
    } else if (colourBox.value === "entropy") {
      [share, colour] = [Math.min(value / 3, 1), BLUE];
    } else {
      [share, colour] = [Math.min(-value / 6, 1), BLUE];
    }
    return "rgba(" + colour + "," + (0.85 * Math.min(Math.max(share, 0), 1)).toFixed(3) + ")";
  }
  function drawLegend() {
    // from left to right: what a place on the scale is, and the colour of the stretch up to the next; the scale of λ has no
    // orange where no λ is above 1
    const bounds = [[data.lower, PURPLE], [1], [data.upper, ORANGE]].filter(([value, colour]) => !colour || value !== 1);
    const [places, note] = {
      gates: [bounds, "no colour: the adapter as it is (λ = 1)" + (data.lower < 0 ? "; wavy line: λ below 0, reversed" : "")],
      delta_entropy: [[["−2 nats or less", PURPLE], ["0"], ["+2 nats or more", ORANGE]],
        "orange: the LoRA is less sure than the base"],
      entropy: [[["0"], ["3 nats or more", BLUE]], "darker: less sure"],
      log_prob: [[["0"], ["−6 or less", BLUE]], "darker: less expected"],
    }[colourBox.value];
    legend.replaceChildren(...places.flatMap(([value, colour], index) => {
      const label = element("span", String(value).replace("-", "−"));
      if (!index) return [label];
      const shade = (own) => (own ? "rgba(" + own + ",.85)" : "transparent"), ramp = element("span", undefined, "ramp");
      ramp.style.background = "linear-gradient(to right, " + shade(places[index - 1][1]) + ", " + shade(colour) + ")";
      return [ramp, label];
    }), element("span", note));
  }
  function visible(text) {
    if (text === "") return "∅";
    return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥");
  }

  let active = null;
  function show(answer, span, position) {
    if (active) { active.classList.remove("active"); active.setAttribute("aria-selected", "false"); }
    active = span;
    span.classList.add("active");
    span.setAttribute("aria-selected", "true");
    span.parentNode.setAttribute("aria-activedescendant", span.id);
    const gate = lambdaAt(answer, position, groups[moduleBox.selectedIndex][1]);
    const line = element("p");
    line.append(element("strong", names[answer.variant] || answer.variant), " token " + (position + 1) + " of "
      + answer.tokens.length + ": “" + visible(answer.tokens[position]) + "”");
    const numbers = "log-probability " + shown(answer.log_prob[position]) + " · entropy " + shown(answer.entropy[position])
      + " nats · ΔH " + shown(answer.delta_entropy ? answer.delta_entropy[position] : null) + " nats · λ (" + groups[moduleBox.selectedIndex][0] + ") " + shown(gate);
    details.replaceChildren(line, element("p", numbers));
    const top = answer.top && answer.top[position];
    if (top && top.length) {
      const table = element("table"), head = element("tr");
      head.append(element("th", "candidate"), element("th", "probability"));
      table.append(head);
      for (const [text, probability] of top) {
        const row = element("tr");
        row.append(element("th", visible(text)), element("td", probability.toFixed(3)));
        table.append(row);
      }
      details.append(table);
    }
  }
  function move(event, answer, spans) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const at = spans.indexOf(active);
    let next = event.key === "Home" ? 0 : event.key === "End" ? spans.length - 1
      : event.key in steps ? Math.min(Math.max((at < 0 ? (steps[event.key] > 0 ? -steps[event.key] : 0) : at) + steps[event.key], 0), spans.length - 1) : -1;
    if (next < 0 || !spans.length) return;
    event.preventDefault();
    show(answer, spans[next], next);
    spans[next].scrollIntoView({ block: "nearest" });
  }

  function draw() {
    const question = data.questions[questionBox.selectedIndex];
    promptBox.textContent = question.prompt + (question.gold ? "\n\nexpected: " + question.gold : "");
    moduleBox.disabled = colourBox.value !== "gates";
    drawLegend();
    active = null;
    details.replaceChildren(element("p", "No token chosen."));
    answersBox.replaceChildren(...question.answers.map((answer, number) => {
      const box = element("div", undefined, "answer");
      const title = element("h4", (names[answer.variant] || answer.variant) + " ");
      if (answer.verdict) {
        title.append(element("span", (answer.verdict.correct ? "✓ right" : "✗ wrong") + " (" + answer.verdict.reason + ")",
          "verdict " + (answer.verdict.correct ? "right" : "wrong")));
      }
      const stream = element("div", undefined, "stream");
      stream.tabIndex = 0;
      stream.setAttribute("role", "listbox");
      stream.setAttribute("aria-label", "Tokens of the answer of " + (names[answer.variant] || answer.variant));
      const spans = answer.tokens.map((text, position) => {
        const span = element("span", visible(text), "token");
        const value = valueAt(answer, position);
        span.id = "token-" + number + "-" + position;
        span.setAttribute("role", "option");
        span.setAttribute("aria-selected", "false");
        span.style.backgroundColor = tint(value);
        // λ is known to a 255th of the range: what may be 0 has no line
        const isReversed = colourBox.value === "gates" && value !== null && value < -(data.upper - data.lower) / 510;
        if (isReversed) span.classList.add("negative");
        span.addEventListener("mouseenter", () => show(answer, span, position));
        span.addEventListener("click", () => show(answer, span, position));
        return span;
      });
      stream.append(...spans);
      stream.addEventListener("keydown", (event) => move(event, answer, spans));
      box.append(title, spans.length ? stream : element("p", "This answer has no token.", "note"));
      if (answer.finish_reason && answer.finish_reason !== "stop") box.append(element("p", "ended by: " + answer.finish_reason, "note"));
      const cut = answer.cut === 1 ? "1 further token is not shown" : answer.cut + " further tokens are not shown";
      if (answer.cut) box.append(element("p", cut, "note"));
      return box;
    }));
  }

  data.questions.forEach((question, index) => option(questionBox, index, (index + 1) + ": " + question.prompt.slice(0, 70)));
  const anyGates = data.questions.some((question) => question.answers.some((answer) => answer.gates));
  for (const [value, text] of Object.entries(colours)) if (value !== "gates" || anyGates) option(colourBox, value, text);
  groups.forEach(([text], index) => option(moduleBox, index, text));
  // the explorer shows every answer in a new document: what was chosen stays
  let kept = null;
  try { kept = window.parent !== window ? window.sessionStorage : null; } catch { /* not for every document */ }
  for (const box of [colourBox, moduleBox]) {
    const before = kept && kept.getItem(box.id);
    if (before !== null && Number(before) < box.options.length) box.selectedIndex = Number(before);
    box.addEventListener("change", () => kept && kept.setItem(box.id, box.selectedIndex));
  }
  for (const box of [questionBox, colourBox, moduleBox]) box.addEventListener("change", draw);
  draw();
})();

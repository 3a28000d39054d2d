"use strict";
// Values under the pointer.
for (const svg of document.querySelectorAll("svg[data-c]")) {
  const data = JSON.parse(svg.dataset.c);
  const [left, right, low, high] = data.x;
  const told = svg.parentElement.querySelector(".told");
  const here = svg.querySelector(".here");
  const show = (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const x = low + ((at - left) / (right - left)) * (high - low);
    let best = null;
    for (const [, xs] of data.c)
      for (const each of xs)
        if (best === null || Math.abs(each - x) < Math.abs(best - x)) best = each;
    if (best === null) return;
    const place = left + ((best - low) / (high - low)) * (right - left);
    here.setAttribute("x1", place);
    here.setAttribute("x2", place);
    here.style.visibility = "visible";
    const values = data.c
      .map(([name, xs, ys]) => [name, ys[xs.indexOf(best)]])
      .filter(([, y]) => y !== undefined)
      .map(([name, y]) => (data.c.length > 1 ? `${name} ` : "") + Number(y.toPrecision(4)));
    told.textContent = `step ${Math.round(best)}: ${values.join(", ")}`;
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", () => {
    here.style.visibility = "hidden";
    told.textContent = "";
  });
}

// The sample browser. Texts are set as text, never as markup.
const box = document.getElementById("samples-data");
if (box !== null) {
  const rows = JSON.parse(box.textContent);
  const PAGE = 12;
  const $ = (id) => document.getElementById(id);
  const make = (tag, text, kind) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const option = (select, value, text) => {
    const each = make("option", text);
    each.value = value;
    select.append(each);
  };
  const distinct = (values) => [...new Set(values)];
  for (const step of distinct(rows.map((r) => r.step))) option($("f-step"), step, `step ${step}`);
  const words = distinct(rows.map((r) => r.reward_detail || ""));
  for (const word of words.sort().slice(0, 40))
    if (word) option($("f-words"), word, word.length > 60 ? `${word.slice(0, 60)}…` : word);
  if (rows.some((r) => !r.reward_detail)) option($("f-words"), "\u0000", "no words");
  const number = (id) => ($(id).value === "" ? null : Number($(id).value));
  const keeps = (row) => {
    const step = $("f-step").value, verdict = $("f-words").value, scored = $("f-scored").value;
    const least = number("f-least"), most = number("f-most");
    if (step !== "" && String(row.step) !== step) return false;
    if (verdict === "\u0000" ? row.reward_detail : verdict !== "" && row.reward_detail !== verdict)
      return false;
    if (scored === "yes" && row.reward === null) return false;
    if (scored === "no" && row.reward !== null) return false;
    if (scored === "length" && row.finish !== "length") return false;
    if (least !== null && !(row.reward !== null && row.reward >= least)) return false;
    if (most !== null && !(row.reward !== null && row.reward <= most)) return false;
    const text = $("f-text").value.toLowerCase();
    return (
      text === "" ||
      [row.prompt, row.answer, row.response, row.reward_detail].some(
        (each) => each !== null && each.toLowerCase().includes(text)
      )
    );
  };
  const last = (value, least) => (value === null || value === undefined ? least : value);
  const orders = {
    step: () => 0,
    worst: (a, b) => last(a.reward, Infinity) - last(b.reward, Infinity),
    best: (a, b) => last(b.reward, -Infinity) - last(a.reward, -Infinity),
    kl: (a, b) => last(b.teacher_kl, -Infinity) - last(a.teacher_kl, -Infinity),
    long: (a, b) => b.tokens - a.tokens,
  };
  const card = (row) => {
    const article = make("article", undefined, "sample");
    const head = make("header");
    const known = row.reward !== null;
    const kind = known ? (row.reward > 0 ? "good" : "bad") : "warn";
    head.append(
      make("span", known ? `reward ${Number(row.reward.toPrecision(4))}` : "no score", `tag ${kind}`),
      make("b", `step ${row.step}`),
      make("span", `group ${row.group}, sample ${row.sample}`, "quiet"),
      make("span", `${row.tokens} tokens, ended by ${row.finish}, weights ${row.weights}`, "quiet")
    );
    const list = make("dl");
    const add = (name, text) => {
      if (text !== null && text !== undefined && text !== "")
        list.append(make("dt", name), make("dd", text));
    };
    add("prompt", row.prompt);
    add("response", row.response === "" ? "(empty)" : row.response);
    add("right answer", row.answer);
    add(known ? "judge's words" : "why no score", row.reward_detail);
    add("scored by", row.reward_source);
    const figures = [];
    if (row.log_prob !== null) figures.push(`rollout log-prob ${row.log_prob} a token`);
    if (row.teacher_kl !== null) figures.push(`above the Teacher's by ${row.teacher_kl}`);
    add("figures", figures.join("; "));
    article.append(head, list);
    return article;
  };
  let found = [], shown = 0;
  const more = () => {
    $("samples").append(...found.slice(shown, shown + PAGE).map(card));
    shown = Math.min(shown + PAGE, found.length);
    $("more").hidden = shown >= found.length;
    $("count").textContent = `${found.length} of ${rows.length} samples match; ${shown} shown`;
  };
  const again = () => {
    found = rows.filter(keeps);
    const order = orders[$("f-order").value];
    found.sort(order);
    shown = 0;
    $("samples").replaceChildren();
    more();
  };
  for (const each of document.querySelectorAll(".filters input,.filters select"))
    each.addEventListener("input", again);
  $("more").addEventListener("click", more);
  again();
}

// The page: headings, the way through the scenes, theme and language.

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function switchTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("polyhead-theme", theme);
  } catch {
    // Storage may be forbidden; the choice then lasts as long as the page.
  }
}

function drawLesson() {
  document.title = t("lesson.title");
  $("#scenes").replaceChildren(...scenes.map(({ name }, i) => element("li", {}, [
    element("a", { href: `#${name}`, data: `go-${name}`, text: `${i + 1}. ${t(`lesson.${name}.title`)}` }),
  ])));
  for (const [i, { name, draw }] of scenes.entries()) {
    const section = $(`#${name}`);
    section.querySelector("h2").textContent = `${i + 1}. ${t(`lesson.${name}.title`)}`;
    section.querySelector(".words").replaceChildren(...t(`lesson.${name}.text`).split("\n").map((text) =>
      paragraph(text, /^[A-Za-zᵢ]+(\(.*\))? =/.test(text) ? "formula" : "")));
    draw(section.querySelector(".live-part"));
    section.querySelector(".more").replaceChildren(...beside(name), ...exercises(name));
  }
}

function makeSections() {
  $("#lesson").append(...scenes.map(({ name }) => element("section", { id: name, "aria-labelledby": `${name}-title`, data: `scene-${name}` }, [
    element("h2", { id: `${name}-title`, tabindex: "-1" }),
    element("div", { classes: "words" }), element("div", { classes: "live-part" }), element("div", { classes: "more" }),
  ])));
}

// Marks the scene in view in the list of scenes.
const inView = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const link = $(`#scenes a[href="#${target.id}"]`);
    if (isIntersecting) link?.setAttribute("aria-current", "true");
    else link?.removeAttribute("aria-current");
  }
}, { rootMargin: "-20% 0px -60% 0px" });

// n and p go to the next scene and to the one before, as a reader's keys.
function onKey(event) {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.matches("input, select, textarea")) return;
  const by = { n: 1, p: -1 }[event.key];
  if (!by) return;
  const tops = scenes.map(({ name }) => $(`#${name}`).getBoundingClientRect().top);
  const here = tops.findLastIndex((top) => top < 80);
  const goal = $(`#${scenes[Math.min(scenes.length - 1, Math.max(0, here + by))].name}`);
  goal.scrollIntoView();
  goal.querySelector("h2").focus({ preventScroll: true });
}

makeSections();
startLanguage(drawLesson);
drawLesson();
for (const section of document.querySelectorAll("#lesson > section")) inView.observe(section);
$("#theme").addEventListener("click", switchTheme);
document.addEventListener("keydown", onKey);
if (location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();

globalThis.polyhead = Object.freeze({
  ready: Promise.resolve(), attend, softmax, entropy, MASKS, online, tiles, traffic, matmul, scaledWeights, rotated, inOrder, isRight,
});

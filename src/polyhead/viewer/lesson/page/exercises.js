// Three exercises of each scene, whose answers are checked here.

/** @type {Record<string, string>} */
const tried = {}; // what the reader has written, which a change of the language keeps

// Whole numbers exactly, others to about two decimals. A comma, spaces and a long minus sign are read too.
function isRight(text, answer) {
  const plain = text.replace(/[−–]/g, "-").replace(/\s/g, "");
  const x = Number(/^-?\d+,\d{1,2}$|^-?0,\d+$/.test(plain) ? plain.replace(",", ".") : plain.replace(/,/g, ""));
  if (plain === "" || Number.isNaN(x)) return false;
  return Number.isInteger(answer) ? x === answer : Math.abs(x - answer) <= Math.max(0.006, 0.002 * Math.abs(answer));
}

function exercise(name, number, answer) {
  const key = `${name}-${number}`;
  const id = `ask-${key}`;
  const input = element("input", { type: "text", inputmode: "decimal", autocomplete: "off", id, data: id });
  input.value = tried[key] ?? "";
  const said = element("output", { for: id, role: "status", data: `said-${key}` });
  const check = () => {
    tried[key] = input.value;
    const right = isRight(input.value, answer);
    said.className = right ? "right" : "wrong";
    said.textContent = input.value.trim() === "" ? "" : right ? t("lesson.ask.right") : t("lesson.ask.wrong");
  };
  const show = () => {
    input.value = String(answer);
    check();
  };
  const form = element("form", { classes: "ask" }, [
    element("label", { for: id, text: t(`lesson.${name}.ask${number}`) }),
    element("span", { classes: "answer" }, [
      input, element("button", { type: "submit", classes: "quiet", text: t("lesson.ask.check"), data: `check-${key}` }),
      button(t("lesson.ask.show"), show, { data: `show-${key}` }), said,
    ]),
  ]);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    check();
  });
  if (input.value) check();
  return element("li", {}, [form]);
}

const exercises = (name) => [
  element("h3", { text: t("lesson.ask.title") }),
  element("ol", { classes: "asks" }, numbers.exercises[name].map((answer, i) => exercise(name, i + 1, answer))),
];

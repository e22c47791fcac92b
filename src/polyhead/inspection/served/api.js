// Talking to the server that sent this page, and to no other.

const begin = JSON.parse($("#begin").textContent);

class Refusal extends Error {}

async function ask(address, body, signal) {
  const options = body === undefined ? {} : { method: "POST", body: JSON.stringify(body), signal };
  let answer;
  try {
    answer = await fetch(address, options);
  } catch {
    if (signal?.aborted) throw new Refusal(t("cancelled"));
    throw new Refusal(t("no_answer"));
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let reason = text;
  try {
    reason = JSON.parse(text).error;
  } catch {
    // A plain sentence.
  }
  throw new Refusal(reason || t("answered", { status: answer.status }));
}

const askJson = async (address, body, signal) => (await ask(address, body, signal)).json();

// The numbers of an answer and their shape.
async function askNumbers(address, Kind) {
  const answer = await ask(address);
  const shape = answer.headers.get("X-Shape").split(",").map(Number);
  return { shape, values: new Kind(await answer.arrayBuffer()) };
}

const headName = (layer, head) => `${layer}.${head}`;
const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const colours = () => ramps[isDark() ? "dark" : "light"];

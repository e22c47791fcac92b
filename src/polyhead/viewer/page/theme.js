// Runs in the head so that a remembered theme is there before the first paint.
try {
  const remembered = localStorage.getItem("polyhead-theme");
  if (remembered === "light" || remembered === "dark") {
    document.documentElement.dataset.theme = remembered;
  }
} catch {
  // Storage may be forbidden; the system's preference then decides.
}

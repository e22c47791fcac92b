// The variants side by side, with the numbers of the model that is chosen in the scene of caches.

scene("table", (box) => {
  const rows = numbers.table;
  const columns = ["variant", "queries", "kv", "cache", "llama", "said", "models"];
  const cell = (row, key) => (key === "said" ? t(`lesson.table.said.${row.name}`)
    : key === "models" && row.name === "FlashAttention" ? t("lesson.table.nearly_all")
      : key === "cache" && row.cache === null ? t("lesson.table.unchanged") : String(row[key] ?? "–"));
  box.replaceChildren(
    element("div", { classes: "scroll", tabindex: "0", role: "region", "aria-label": t("lesson.table.title") }, [
      element("table", { classes: "matrix wide", data: "table" }, [
        element("thead", {}, [element("tr", {}, columns.map((key) => element("th", { scope: "col", text: t(`lesson.table.${key}`) })))]),
        element("tbody", {}, rows.map((row) => element("tr", {}, [
          element("th", { scope: "row", text: row.name }),
          ...columns.slice(1).map((key) => element("td", { classes: key === "said" ? "words" : "", "data-label": t(`lesson.table.${key}`), text: cell(row, key) })),
        ]))),
      ]),
    ]),
    paragraph(t("lesson.table.percent", numbers.savings)),
    paragraph(t("lesson.table.stars")),
  );
});

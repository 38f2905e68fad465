const dark = matchMedia("(prefers-color-scheme: dark)").matches;
for (const box of document.querySelectorAll(".chart")) {
  const chart = JSON.parse(box.firstElementChild.textContent);
  for (const part of chart.vconcat ?? [chart]) part.width = Math.max(160, box.clientWidth - 110);
  vegaEmbed(box, chart, {
    actions: false,
    renderer: "canvas", // thousands of spans
    ast: true, // the page's policy allows no eval
    logLevel: 1, // errors: a layer without points is none
    theme: dark ? "dark" : undefined,
    config: {
      background: "transparent",
      text: { color: dark ? "#e7ebef" : "#1b1f24" },
      axis: { gridColor: dark ? "#313942" : "#d9dee4" },
    },
  });
}

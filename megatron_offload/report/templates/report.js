const dark = matchMedia("(prefers-color-scheme: dark)");
const looks = new Map(); // of each chart, how it is drawn
const views = new Map();
const charts = [...document.querySelectorAll(".chart")];
const picker = document.querySelector("#rank");

async function draw(box) {
  const look = `${box.clientWidth} ${dark.matches}`;
  if (!box.clientWidth || looks.get(box) === look) return; // what is hidden is drawn when it is picked
  looks.set(box, look);
  const bytes = Uint8Array.from(atob(box.firstElementChild.textContent), (c) => c.charCodeAt(0));
  const unzipped = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const chart = await new Response(unzipped).json();
  for (const part of chart.vconcat ?? []) part.width = Math.max(160, box.clientWidth - 125); // labels
  if (!chart.vconcat) {
    chart.width = box.clientWidth;
    chart.autosize = { type: "fit-x", contains: "padding" };
  }
  const own = document.createElement("div");
  const ink = dark.matches ? "#e7ebef" : "#1b1f24";
  const found = await vegaEmbed(own, chart, {
    actions: false,
    renderer: "canvas", // thousands of spans
    ast: true, // the page's policy allows no eval
    logLevel: 1, // errors: a layer without points is none
    theme: dark.matches ? "dark" : undefined,
    config: {
      background: "transparent",
      text: { color: ink },
      axis: { gridColor: dark.matches ? "#313942" : "#d9dee4" },
      legend: { columns: box.clientWidth < 670 ? 1 : 5, labelLimit: 0 },
    },
  });
  if (looks.get(box) !== look) return found.finalize(); // it has another width by now
  views.get(box)?.finalize();
  views.set(box, found);
  box.lastElementChild.replaceWith(own);
  const canvas = box.querySelector("canvas");
  canvas.style.touchAction = "pan-y"; // up and down a finger scrolls the page
  const show = (event) => canvas.dispatchEvent(new PointerEvent("pointermove", event));
  canvas.addEventListener("pointerdown", show, true); // Vega must know which part a finger is on
  found.view.addEventListener("click", (event, mark) => pick(mark?.datum?.rank));
}

function pick(rank) {
  if (!picker || rank === undefined) return;
  picker.value = rank;
  for (const one of document.querySelectorAll("[data-rank]")) one.hidden = one.dataset.rank != rank;
}

function zoom(button) {
  const canvas = button.parentElement.nextElementSibling.querySelector("canvas");
  const box = canvas.getBoundingClientRect();
  const at = { bubbles: true, clientX: box.left + box.width / 2, clientY: box.top + 30 };
  canvas.dispatchEvent(new PointerEvent("pointermove", at)); // says to Vega which part is meant
  canvas.dispatchEvent(new WheelEvent("wheel", { ...at, deltaY: Number(button.dataset.zoom) }));
}

picker?.addEventListener("change", () => pick(picker.value));
for (const one of document.querySelectorAll("[data-zoom]")) one.addEventListener("click", () => zoom(one));
dark.addEventListener("change", () => charts.forEach(draw));
const widths = new ResizeObserver((seen) => seen.forEach(({ target }) => draw(target)));
for (const box of charts) widths.observe(box);

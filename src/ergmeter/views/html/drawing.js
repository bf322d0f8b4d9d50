// What a page in a file and the pages of `erg serve` draw charts with.

// Vega-Lite leaves the cells that find the nearest reading in what is read aloud.
function silent(spec) {
  for (const mark of spec.marks || []) {
    mark.aria = false;
    silent(mark);
  }
  return spec;
}

// What to draw of a chart that has several x axes: its points over the chosen one, or where it
// lacks that over its own.
function overAxis(chart, name) {
  if (!chart.axis) return chart.spec;
  const axis = chart.axes[name] || chart.axes[chart.axis];
  const spec = structuredClone(chart.spec); // Vega keeps what it is given
  for (const layer of spec.layer) layer.encoding.x = axis;
  spec.description += `; x axis: ${axis.title}`;
  return spec;
}

// The axis that is chosen; the page may be one that has no choice.
function chosenAxis() {
  const box = document.querySelector("#x-axis input:checked");
  return box ? box.value : "";
}

// Draw again whenever another is chosen, one after the other: keys are quicker than charts.
function followAxis(charts, draw, ready) {
  let turn = ready;
  document.getElementById("x-axis")?.addEventListener("change", () => {
    turn = turn.then(async () => {
      const name = chosenAxis();
      for (const chart of charts.filter((one) => one.axis)) {
        try {
          await draw(chart);
        } catch (error) { // the others, and the next choice, are drawn all the same
          document.getElementById("chart-" + chart.id)?.replaceChildren("not drawn: " + error.message);
        }
      }
      document.documentElement.dataset.axis = name;
    });
  });
}

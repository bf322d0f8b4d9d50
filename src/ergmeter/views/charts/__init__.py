"""Charts as Vega-Lite specifications, each with its data table."""

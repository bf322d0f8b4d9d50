"""Reports to be looked at: charts as Vega-Lite, and one page that needs no network."""

"""Commands that show a run: report, serve, plot, check, explain, card, watch, job."""

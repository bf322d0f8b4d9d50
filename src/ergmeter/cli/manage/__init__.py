"""Commands that manage runs: import, runs, export, doctor."""

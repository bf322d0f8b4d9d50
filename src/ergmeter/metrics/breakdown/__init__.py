"""Where the time of a run went, for charts and tables."""

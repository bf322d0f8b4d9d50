"""A matrix of scenarios: planned, run, kept and compared."""

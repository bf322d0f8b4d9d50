"""Benchmarks: plans a matrix of scenarios, runs its cells, stores and compares the results."""

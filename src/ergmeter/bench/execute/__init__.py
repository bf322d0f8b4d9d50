"""Runs cells: processes, nodes, launch environment, state, outcome."""

"""Estimates before a run: memory, time, energy and cost."""

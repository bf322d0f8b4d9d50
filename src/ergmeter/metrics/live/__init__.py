"""Metrics of a run that is still being written."""

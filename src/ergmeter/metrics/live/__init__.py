"""A run that is still being written: recent metrics, time left, running totals and alerts."""

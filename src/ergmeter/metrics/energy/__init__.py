"""Joules from counters and power readings: up to any instant, and over the window."""

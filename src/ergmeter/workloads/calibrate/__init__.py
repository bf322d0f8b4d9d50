"""Measures what this machine can reach: FLOP/s, bandwidth, power."""

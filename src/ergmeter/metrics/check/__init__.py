"""Checks that say whether a measurement can be compared with another."""

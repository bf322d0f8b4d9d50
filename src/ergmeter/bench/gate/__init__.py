"""Compares two benches cell by cell and judges them by rules."""

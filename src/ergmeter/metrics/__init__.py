"""Pure functions of a run's columns, listed in one catalogue. Nothing here reads a clock."""

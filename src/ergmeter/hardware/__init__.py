"""Dense peaks of devices by data type, from a table with sources; grids; calibrations."""

"""What the calculating commands show: FLOPs, estimates, tables of devices and grids."""

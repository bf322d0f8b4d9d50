"""Facts about hardware with sources: devices' peaks, calibrations, carbon intensity of grids."""

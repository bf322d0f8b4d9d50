"""Commands that measure: record, load, train, prepare, calibrate, demo."""

"""Commands that measure: record, import, load, train, prepare, calibrate, demo."""

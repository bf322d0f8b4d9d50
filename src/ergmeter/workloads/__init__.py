"""Jobs to measure: a demo, fine-tuning, calibration. They need torch."""

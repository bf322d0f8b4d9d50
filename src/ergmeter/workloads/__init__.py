"""Jobs to measure: a demo, fine-tuning, calibration. Only these modules import torch."""

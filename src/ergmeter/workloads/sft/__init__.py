"""Fine-tuning as a job to measure: its configuration, data, models and training."""

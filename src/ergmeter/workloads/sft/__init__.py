"""Fine-tuning as a job to be measured: its configuration, its data, its models, its training."""

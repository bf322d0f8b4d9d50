"""The YAML configuration of a fine-tuning: its keys, values and contradictions."""

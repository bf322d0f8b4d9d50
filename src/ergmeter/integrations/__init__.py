"""Integrations: each measures an existing training loop or framework with a `Meter`."""

"""The original Trainium calculator's own numbers, with its quirks listed."""

"""The waterfall from the peak to MFU, and what to try first."""

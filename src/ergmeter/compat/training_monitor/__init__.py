"""The profiler-based MFU monitor: its functions, its class, its log."""

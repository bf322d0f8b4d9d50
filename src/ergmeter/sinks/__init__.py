"""Sinks send metrics to other tools while a run is measured: one module per tool."""

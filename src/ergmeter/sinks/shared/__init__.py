"""Shared by the sinks: options, selection and names of metrics, files that are appended to."""

"""Shared by the importers: lines, step lines, spans of time, tables."""

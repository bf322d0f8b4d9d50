"""What importers share: lines, step lines, spans of time, tables."""

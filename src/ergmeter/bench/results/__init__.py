"""Rows of results: schema, files, memory, overview."""

"""Renders a document: one module for each medium."""

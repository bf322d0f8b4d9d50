"""A model as a graph of operations, built from its configuration."""

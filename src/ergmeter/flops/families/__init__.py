"""How each model family's configuration becomes a graph."""

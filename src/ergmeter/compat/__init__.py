"""The names and behaviour of the five original systems, one module or folder each."""

"""The training that `erg demo` measures."""

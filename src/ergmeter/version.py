"""The version, at the bottom of the layers: the run's header holds it."""

__version__ = "0.1.0"

"""Requests to an inference server, and what they cost."""

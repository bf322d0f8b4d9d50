"""Views render what is below and compute nothing."""

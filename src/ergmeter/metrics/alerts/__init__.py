"""Rules that raise an alert, the state each needs, and how alerts are stored and shown."""

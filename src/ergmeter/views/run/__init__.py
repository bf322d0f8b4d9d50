"""Output about one run: card, report page, check, explain, memory, live view."""

"""What is shown of one run on the terminal: card, check, explain, memory, live view."""

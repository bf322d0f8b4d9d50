"""A run as columns: its samples, its steps, the window, the ranks, the devices it used."""

"""Ways into training loops that are there already. Each is thin: it calls what is below."""

"""What is known of a Trainium job: its YAML, log, compile cache, machine and pace."""

"""From a file of scenarios to cells with their commands."""

"""AMD GPUs through amdsmi."""

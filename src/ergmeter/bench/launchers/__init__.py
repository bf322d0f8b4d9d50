"""Who has the cells run: this machine, or a cluster's scheduler. One module each."""

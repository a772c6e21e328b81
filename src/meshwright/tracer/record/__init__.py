"""Recording of one rank's operators, collectives, storages and numbers."""

"""What one rank does: operators, collectives, storages and numbers, recorded."""

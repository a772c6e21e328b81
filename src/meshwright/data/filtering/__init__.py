"""Which documents of a source are kept: no broken ones, and no copies."""

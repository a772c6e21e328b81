"""Context parallelism: all-gather, ring, Ulysses."""

"""Context parallelism: gathering, ring, Ulysses."""

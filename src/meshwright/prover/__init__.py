"""Equivalence proofs: layouts train what one process trains, on a small model of the same architecture."""

"""Expert parallelism: placement and token exchange."""

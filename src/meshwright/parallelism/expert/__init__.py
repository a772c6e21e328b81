"""Expert parallelism: sharding of experts and token exchange."""

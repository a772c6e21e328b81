"""Pipeline parallelism: stages, actions, split backwards."""

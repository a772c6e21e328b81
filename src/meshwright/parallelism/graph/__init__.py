"""A model as one graph: sharding and collectives inside of it (layout.compile = "model")."""

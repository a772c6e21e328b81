"""parallelize(model, layout): the mesh and the order in which parallelisms are applied."""

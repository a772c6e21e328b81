"""parallelize(model, layout): the mesh, and each parallelism in the order in which it is applied."""

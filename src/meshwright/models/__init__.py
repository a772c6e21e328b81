"""Plain nn.Module models, without ranks, meshes or process groups."""

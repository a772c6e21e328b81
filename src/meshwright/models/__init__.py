"""Plain nn.Module models: no rank, no mesh, no process group."""

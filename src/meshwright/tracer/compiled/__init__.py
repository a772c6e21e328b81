"""Compiled blocks: the kernels that torch.compile makes of a graph, recorded without a device."""

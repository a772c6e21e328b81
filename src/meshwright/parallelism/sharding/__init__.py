"""How each model's parameters lie over the tensor-parallel ranks: one table a model."""

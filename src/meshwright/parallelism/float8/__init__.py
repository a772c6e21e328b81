"""Linear layers in float8, with torchao."""

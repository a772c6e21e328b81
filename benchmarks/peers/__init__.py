"""Training on CPU ranks next to other programs that train the same model."""

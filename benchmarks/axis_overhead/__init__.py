"""What an axis costs besides its arithmetic and its bytes: our step, the same written by hand, and torch's own way."""

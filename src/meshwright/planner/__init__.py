"""The layout search: enumerate, keep what fits, price, explain. No torch."""

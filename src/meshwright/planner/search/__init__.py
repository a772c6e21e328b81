"""The search over layouts: enumerate, bound, price, choose."""

"""What differs where kernels run on the host's own cores: rates as measured there, and nothing that overlaps."""

"""Causal attention and who computes it: torch's kernels, FlexAttention, varlen_attn, latent heads."""

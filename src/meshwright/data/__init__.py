"""Text to token samples: sources, tokenizers, the token cache, and a loader independent of the number of ranks."""

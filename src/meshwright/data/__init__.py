"""Text to token samples: sources, tokenizers, the token cache, and a loader whose position no rank count changes."""

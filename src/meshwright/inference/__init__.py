"""Text generation from a run or a Hugging Face folder, with a KV cache."""

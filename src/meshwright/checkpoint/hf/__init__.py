"""Hugging Face folders: export and import through one declarative name map for each model family."""

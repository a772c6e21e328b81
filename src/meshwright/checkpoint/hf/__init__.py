"""Hugging Face folders: export and import by one name map per model family."""

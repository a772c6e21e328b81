"""Adapters in the files of Hugging Face's PEFT: written, and read as a start."""

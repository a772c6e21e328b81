"""Checkpoints: saving and loading of a training state as one directory; Hugging Face folders."""

"""Saving and loading a training state as whole directories; Hugging Face folders through name maps."""

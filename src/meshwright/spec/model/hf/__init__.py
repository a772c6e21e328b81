"""Configurations of Hugging Face models, to and from architectures."""

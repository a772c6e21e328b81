"""Commands on what became of a trained model: its checkpoints, import, export and generation."""

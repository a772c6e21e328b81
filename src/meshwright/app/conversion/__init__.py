"""What becomes of a trained model: its checkpoints, import, export and generation."""

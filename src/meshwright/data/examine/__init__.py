"""What a corpus and its samples hold: for a reader, not for training."""

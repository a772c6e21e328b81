"""What a corpus and its samples hold, for a reader, and whether a model can take them."""

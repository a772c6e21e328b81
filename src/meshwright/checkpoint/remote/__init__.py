"""A second copy of checkpoints at a URL: uploads in the background, and the fetch of the newest; needs no torch."""

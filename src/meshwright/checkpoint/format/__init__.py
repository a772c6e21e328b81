"""What lies on the disk: names, indexes, manifests, boxes of tensors, and writes that a power cut cannot tear."""

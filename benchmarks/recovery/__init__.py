"""What a killed rank costs: Meshwright's restart, torchrun's, torchft and NVRx by one script."""

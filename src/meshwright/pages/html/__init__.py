"""Pages of one HTML file each."""

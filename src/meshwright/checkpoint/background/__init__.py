"""What training does not wait for: staged saves, and the processes that write, upload and export for a rank."""

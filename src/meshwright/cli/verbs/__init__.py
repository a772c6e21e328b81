"""One file a command: it parses, calls `app` and prints."""

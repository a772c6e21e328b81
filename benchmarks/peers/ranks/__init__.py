"""One rank of each way: programs that run in environments of their own, so they import only what that holds."""

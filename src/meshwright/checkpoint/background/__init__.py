"""Asynchronous saves: staging into shared memory, and the process of each rank that writes from it."""

"""Device memory pools, staging buffers, snapshots.

Empty until asynchronous checkpoints are built.
"""

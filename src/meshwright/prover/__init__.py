"""Proves layouts, tensor by tensor against one process, and that a job under faults ends as the job without."""

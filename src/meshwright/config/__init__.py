"""Reads a job file and overrides into a Job, tells where each value came from, writes the JSON Schema."""

"""Reads a job file and overrides into a Job with the origin of each value; writes the JSON Schema."""

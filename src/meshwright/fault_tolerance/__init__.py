"""Fault tolerance: guards against silent errors, heartbeats, flight records, diagnosis of hangs."""

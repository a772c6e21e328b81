"""Guards against silent errors, heartbeats, and the diagnosis of hangs."""

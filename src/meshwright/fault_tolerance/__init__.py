"""Guards against silent errors, heartbeats, the diagnosis and the end of hangs, and faults to inject."""

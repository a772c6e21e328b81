"""Guards against silent damage now; quorum, heartbeat, recovery and injection later."""

"""The discrete-event engine: executes the programs of all ranks on a cluster."""

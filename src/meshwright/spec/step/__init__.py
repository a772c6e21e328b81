"""One step: its workload, its estimate, the parts of its time, and what a simulation found."""

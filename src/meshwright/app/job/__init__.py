"""What commands need of a job: loading it, everything wrong with it, its summary, and its memory budget."""

"""Where steps to trace come from, and the processes that trace them."""

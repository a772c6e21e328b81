"""Tables for a terminal of 80 columns."""

"""Published training runs, the fit of the constants on them, and the table of errors."""

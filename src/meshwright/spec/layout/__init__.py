"""A parallel layout: its degrees, how it is written, how it cuts stages."""

"""Formats of sources: documents as pieces of text, and stored tokens that are read in place."""

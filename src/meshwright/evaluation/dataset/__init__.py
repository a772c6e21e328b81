"""Reads files of measured runs: what each row says, and what has to be assumed where it says nothing."""

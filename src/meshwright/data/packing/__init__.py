"""Rows of whole documents."""

"""Connections between processes of one job that prove its token to each other, and ports that close."""

"""Channels: connections between processes of one job, each end of which has proven that it knows the token."""

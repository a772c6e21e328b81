"""Figures of plotly, and what they draw."""

"""Fits the constants of the cost formulas to measured runs."""

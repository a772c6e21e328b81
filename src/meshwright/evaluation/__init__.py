"""Predictions against published and own runs: the rows, the fit of constants, and the error of predictions."""

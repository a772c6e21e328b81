"""Losses of the last stage: next tokens, whole or in chunks, compiled or not, pairs of answers; what they count."""

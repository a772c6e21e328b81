"""Replays measured runs and scores the predictions."""

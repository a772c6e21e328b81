"""Checkpoints next to those of torch and safetensors: corruption, kills, speed, scale."""

"""Optimizers of sharded parameters: AdamW in three formats of states, Muon, groups by name, updates in backward."""

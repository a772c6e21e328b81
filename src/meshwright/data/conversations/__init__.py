"""Conversations to tokens: records, chat templates, and which tokens are targets."""

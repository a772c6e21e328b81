"""The nouns: frozen, validated, torch-free data that every other package speaks in."""

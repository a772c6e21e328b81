"""Data types shared by all packages: frozen, validated, without torch."""

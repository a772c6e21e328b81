"""Local ranks: forked from a warm server, watched and ended as groups, again where that can help."""

"""What a block of a model does on one rank, and where blocks of several models stand, before any price."""

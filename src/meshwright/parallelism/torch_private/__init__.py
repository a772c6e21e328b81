"""What depends on private parts of torch or on its version, one function each."""

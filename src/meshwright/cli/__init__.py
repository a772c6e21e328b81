"""The command line: one file per verb; a package is imported only when its verb is called."""

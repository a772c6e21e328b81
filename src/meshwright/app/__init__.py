"""The commands as functions: `import meshwright` and the command line call them."""

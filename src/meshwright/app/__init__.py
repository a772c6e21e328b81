"""What Meshwright does, one function a verb: the command line and `import meshwright` call these."""

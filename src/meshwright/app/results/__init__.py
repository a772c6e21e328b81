"""Results of `import meshwright`: data types of spec with a one-line repr, a table, a data frame and plots."""

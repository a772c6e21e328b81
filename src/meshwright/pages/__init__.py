"""Tables, figures and HTML pages of plans, simulations and runs; reads the data types of spec only."""

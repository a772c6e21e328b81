"""Tables, pages and comparisons of a Run; reads nouns only."""

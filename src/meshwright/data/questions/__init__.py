"""Multiple-choice questions: their file, the tokens to score, and the accuracy that follows."""

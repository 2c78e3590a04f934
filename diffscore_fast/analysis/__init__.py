"""What is read out of scores: two systems compared, and texts coloured by their tokens."""

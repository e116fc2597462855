"""Looking at models and gates: what they cost, what they did, what they would do."""

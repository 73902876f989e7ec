"""Hidden Markov models: emissions, EM, filtering."""

"""Numbers that a run is judged by: likelihoods, with their standard errors."""

"""One module per claim: the statement, the counterevidence, the measurement and the rule for the verdict."""

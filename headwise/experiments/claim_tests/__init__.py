"""One file a claim: what is said, what would count against it, how it is measured, and the rule of the verdict."""

"""Something stays changed. Heads are cut, what they gave on average is folded in, and models stay small."""

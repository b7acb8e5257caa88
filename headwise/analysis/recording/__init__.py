"""What a model reads, and what its heads did with it: recorded, or one sentence at once."""

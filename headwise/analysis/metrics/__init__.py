"""What a measure is, and every measure there is: numbers of every head, added up while a model reads."""

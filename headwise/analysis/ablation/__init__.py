"""What a head is worth: heads taken away, and what the model loses."""

"""What heads write: words, logits, and what can be decoded from them."""

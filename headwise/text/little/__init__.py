"""The little language: endless English-like documents with gold relations."""

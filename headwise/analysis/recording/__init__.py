"""Tokenized corpora, batches, recordings of head activations, and attention maps of one text."""

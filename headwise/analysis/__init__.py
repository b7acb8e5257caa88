"""Nothing stays changed. What every head does, measured over a corpus, with evidence."""

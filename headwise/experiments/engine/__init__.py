"""Infrastructure of experiments: result store, training pool, timing, memory and statistics with confidence intervals."""

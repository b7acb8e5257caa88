"""Why a token looked where it looked."""

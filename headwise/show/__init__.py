"""Room 12: people meet it. For now the demo and its tables."""

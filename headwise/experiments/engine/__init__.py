"""What experiments run on: training runs kept by what decides them, processes, clocks, figures with their intervals."""

"""Figures for reports and papers. Each is a `FigureWithData`: a matplotlib figure and its data."""

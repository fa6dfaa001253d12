"""Differences that rounding noise explains: gradients whose terms cancel, and what they update."""

"""Engines behind one protocol: one adapter a file."""

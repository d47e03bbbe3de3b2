"""Measures servers from outside; not part of the installed package."""

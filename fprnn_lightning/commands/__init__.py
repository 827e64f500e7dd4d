"""Subcommands beside fit, validate, test and predict."""

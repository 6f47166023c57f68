"""The version of p2ptrain, in one place; setup.cfg reads it from here."""

__version__ = "0.1.0"

"""The command line: one file per command, no logic, and nothing heavy imported before a command runs."""

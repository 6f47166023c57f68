"""Settings of the run and of the machine, presets, and the table of flags, variables and TOML keys."""

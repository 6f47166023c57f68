"""The run's and the machine's settings, presets, and the table that makes flags, variables and TOML of them."""

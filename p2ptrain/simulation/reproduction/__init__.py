"""The papers' claims, tried at a scale that two cores manage: experiments as TOML, the claim beside the outcome."""

"""The papers' claims, tried at a scale that two cores manage: experiments as TOML, with the claim beside the outcome."""

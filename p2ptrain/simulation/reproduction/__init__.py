"""Small-scale reproductions of the papers' claims: experiments as TOML, with claims and verdicts."""

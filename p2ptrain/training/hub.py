"""Whether the Hugging Face hub answers.

Its libraries try six times before they say that it does not, which takes up to 36 s.
"""

from __future__ import annotations

HUB_TIMEOUT_S = 10.0


def is_hub_there() -> bool:
    """Whether the hub answers; blocks for up to HUB_TIMEOUT_S, usually for 0.1 s. False in the hub's offline mode."""
    import huggingface_hub

    try:
        # Any answer will do; a proxy of the environment is used.
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=HUB_TIMEOUT_S)
    except Exception:  # of the HTTP library that this version uses
        return False
    return True

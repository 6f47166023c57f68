"""The web page that shows a run while it trains."""

"""The network: libp2p streams and a DHT on a background thread. The only package that imports hivemind."""

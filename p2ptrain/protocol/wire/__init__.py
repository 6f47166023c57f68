"""Messages and their bytes, frames, and the interface of a transport."""

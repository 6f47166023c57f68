"""Messages, their serialization, frames, and the interface of a transport."""

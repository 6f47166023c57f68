"""What goes over the wire: messages, serialization, frames, and what a transport must offer."""
